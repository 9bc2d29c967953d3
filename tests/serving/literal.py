"""The serving engine event by event: every iteration is an event, every transfer a process.

Plays the rules of `arborsim.machine.server` with SimPy, and with sums that are added up afresh for
every iteration.  It is slow, and exists so that the closed form can be compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import simpy

from arborsim.machine.batch import Batch, IterationTime, Span, Sums
from arborsim.machine.clock import SAME_MOMENT, Callback, Clock, Iterate, Link, Spend, Steps
from arborsim.machine.machine import ServingOptions
from arborsim.machine.price import Price
from arborsim.machine.program import NOTHING, Extra, Piece, PricedProgram
from arborsim.machine.scheduler import Arrivals
from arborsim.machine.server import Server


class EventLink(Link):
    """One direction of a link as a SimPy resource: whoever asks first is served first."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.place = simpy.Resource(clock.env, capacity=1)

    def send(self, size_bytes: int, seconds: float, done: Callback) -> None:
        """Ask for a transfer; `done` is called when it has ended."""
        self.moving_s += seconds
        self.carried_bytes += size_bytes
        self._clock.env.process(self._carry(seconds, done, self.place.request()))

    def _carry(self, seconds: float, done: Callback, turn: Any) -> Steps:
        yield turn
        yield self._clock.env.timeout(seconds)
        self.place.release(turn)
        done()


class EventClock(Clock):
    """A clock whose links are SimPy resources."""

    up: EventLink

    def __init__(self) -> None:
        super().__init__(EventLink)


class LiteralBatch(Batch):
    """Members in a list; nothing is kept that can be counted."""

    def __init__(self) -> None:
        self.iteration = 0
        self._joined: list[tuple[int, Piece, int]] = []  # key, piece, iterations done

    def __len__(self) -> int:
        return len(self._joined)

    def __contains__(self, key: int) -> bool:
        return any(member == key for member, _, _ in self._joined)

    @property
    def sums(self) -> Sums:  # type: ignore[override]
        total = Sums()
        for _, piece, done in self._joined:
            total.add(piece, done, 1)
        return total

    def add(self, key: int, piece: Piece, i: int = 0) -> None:
        self._joined.append((key, piece, i))

    def remove(self, key: int) -> int:
        (found,) = (member for member in self._joined if member[0] == key)
        self._joined.remove(found)
        return found[2]

    def next_end(self) -> int:
        return min(piece.iterations - done for _, piece, done in self._joined)

    def advance(self, k: int) -> None:
        self.iteration += k
        self._joined = [(key, piece, done + k) for key, piece, done in self._joined]

    def ended(self) -> list[int]:
        found = [key for key, piece, done in self._joined if done == piece.iterations]
        self._joined = [member for member in self._joined if member[2] < member[1].iterations]
        return found


class LiteralTime(IterationTime):
    """What one iteration takes, term by term as the cost model has it."""

    def __init__(self, pricing: Price) -> None:
        super().__init__(pricing)
        self._pricing = pricing

    def one(self, s: Sums, extra: Extra = NOTHING) -> Span:
        seconds, exposed_s, policy_s, memory_s = self._seconds(s, extra)
        prefill_s = 0.0
        if extra.tokens:
            decode_s = self._seconds(s, NOTHING)[0] if s.sequences else 0.0
            prefill_s = max(0.0, seconds - extra.policy_s - decode_s)
        computing_s, reading_s = self._pricing.products_busy_s(
            s.sequences + extra.tokens, s.sequences + extra.prompts
        )
        compute_s = s.compute + extra.compute_s + computing_s
        memory_s += reading_s
        held = s.hbm * seconds
        return Span(seconds, held, compute_s, memory_s, exposed_s, policy_s, prefill_s)

    def _seconds(self, s: Sums, extra: Extra) -> tuple[float, float, float, float]:
        """In all, exposed, of policies, and of reading memory."""
        p = self._pricing
        compute_s = s.compute + extra.compute_s
        sequences = s.sequences + extra.sequences
        if p.measured:
            memory_s, model_s = self._kernels_s(s, extra)
        else:
            memory_s = p.weights_s(s.sequences + extra.tokens) + s.kv + extra.kv_s
            model_s = p.cost.layers_s(s.sequences + extra.tokens, s.longest())
            if p.gpus > 1:  # two all-reduces a layer
                row_bytes = p.cost.geometry.hidden * p.cost.geometry.weight_bytes_per_element
                whole_s = p.cost.profile.all_reduce_s(
                    p.gpus, row_bytes * (s.sequences + extra.tokens)
                )
                small_s = p.cost.profile.all_reduce_s(p.gpus, 0.0)
                share = bytes_share = 1.0
                if p.engine is not None:
                    share, bytes_share = p.engine.all_reduce_share, p.engine.all_reduce_bytes_share
                whole_s = share * small_s + bytes_share * (whole_s - small_s)
                model_s += 2 * p.cost.geometry.layers * whole_s
        hidden_s = p.overlap * min(compute_s, memory_s)
        model_s += compute_s + memory_s - hidden_s + s.dequantise
        choosing_s = s.serial - p.sequence_s * s.sequences  # pages of DDR
        model_s += choosing_s + p.step_s + p.sequence_s * sequences
        least_s = p.launch_s + s.launch
        if p.launch_s and p.engine is not None and not p.engine.graphs and p.engine.integrations:
            least_s += p.cost.geometry.layers * s.longest().one_s
        model_s = max(model_s, least_s)
        stream_s = max(s.stream, self.stream_floor_s) if s.streamed_bytes else 0.0
        exposed_s = max(0.0, stream_s - model_s)
        attention_s = memory_s if p.measured else s.kv
        exposed_s += max(0.0, s.near - (attention_s + s.dequantise)) if s.near else 0.0
        policy_s = s.policy + extra.policy_s
        return model_s + exposed_s + policy_s, exposed_s, policy_s, memory_s

    def _kernels_s(self, s: Sums, extra: Extra) -> tuple[float, float]:
        """Attention of the batch, and the other kernels of a pass."""
        p, f = self._pricing, self._pricing.forward
        tokens, g = s.sequences + extra.tokens, f.geometry
        attention_s = f.attention_s(s.sequences, s.kv_tokens)
        products_s, experts_s = (
            f.products_s(tokens, s.sequences + extra.prompts), f.experts_s(tokens)
        )  # fmt: skip
        rest_s = products_s + experts_s
        if tokens:  # kernels take longer in passes over prompts, by their share of the tokens
            of_prompts = (tokens - s.sequences) / tokens
            share = f.engine.prefill_share
            rest_s += products_s * of_prompts * (share - 1.0)
            share *= f.engine.mxfp4_prompt_share if g.expert_type == "mxfp4" else 1.0
            rest_s += experts_s * of_prompts * (share - 1.0)
        rest_s += f.elementwise_s(tokens) + f.all_reduce_s(tokens, prefill=extra.tokens > 0)
        rest_s += f.windows_s(s.sequences)
        layer_s = f.engine.prefill_layer_s if extra.tokens else f.engine.layer_s
        rest_s += g.layers * layer_s
        rest_s += g.layers * p.cost.longer_layer_s(tokens, s.longest())
        # What parts of prompts take by themselves: attention.
        return attention_s, rest_s + extra.serial_s - p.sequence_s * extra.sequences


def play_event_by_event(
    demands: Sequence[PricedProgram],
    peaks: Sequence[int],
    pricing: Price,
    options: ServingOptions,
    kv_bytes: int,
    arrivals: Arrivals,
) -> Server:
    """Let searches arrive and be served, one event at a time."""
    clock = EventClock()
    server = Server(demands, peaks, pricing, options, kv_bytes, clock, LiteralBatch())
    server.expect(arrivals)
    clock.env.run(until=clock.env.process(_serve(server, clock, LiteralTime(pricing))))
    return server


def _serve(server: Server, clock: EventClock, time: LiteralTime) -> Steps:
    """Carry out the server's commands; what happens at the same time happens before."""
    yield from _settle(clock.env)
    for command in server.loop():
        if isinstance(command, Iterate):
            yield from _iterate(server, clock, time, command)
            continue
        before = clock.now
        if isinstance(command, Spend):
            yield clock.env.timeout(command.seconds)
        else:
            assert clock.next_s < float("inf"), "waiting for what will never happen"
            yield clock.env.timeout(clock.next_s - clock.now)
        yield from _settle(clock.env)
        server.state.spent(clock.now - before)


def _iterate(server: Server, clock: EventClock, time: LiteralTime, command: Iterate) -> Steps:
    env, sums = clock.env, server.state.batch.sums
    turn = None
    if sums.streamed_bytes:
        before = clock.now
        place = clock.up.place
        while place.count or place.queue:
            yield env.timeout(max(0.0, env.peek() - env.now))
            yield from _settle(env)
        turn = place.request()
        yield turn
        server.state.spent(clock.now - before)
        server.state.tally.busy.exposed_s += clock.now - before
    time.stream_floor_s = server.state.stream_floor_s
    span = time.one(sums, command.extra)
    server.state.passing(1)
    yield env.timeout(span.seconds)
    if turn is not None:
        clock.up.place.release(turn)
    yield from _settle(env)
    server.state.passed(span, 1)


def _settle(env: simpy.Environment) -> Steps:
    """Let everything else that happens now happen first."""
    while env.peek() <= env.now * (1.0 + SAME_MOMENT):
        yield env.timeout(max(0.0, env.peek() - env.now))
