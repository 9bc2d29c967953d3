"""The live executor: decisions become moves of real tensors, and bytes by tier are measured."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from arborsim.core.events import TokenRun
from arborsim.core.measurements import Measurements
from arborsim.core.tiers import Tier, by_tier
from arborsim.core.tree import GrowingTable, ThoughtTree
from arborsim.memory.moves import ALL_GROUPS, Moves
from arborsim_torch.cache.mover import Mover
from arborsim_torch.cache.pairs import GroupTokenPairs
from arborsim_torch.cache.pool import Pool
from arborsim_torch.decoder import TreeDecoder


def waits_on(clock: Callable[[], float]) -> bool:
    """Whether the clock goes on while the thread waits; a thread's CPU time does not."""
    return clock is not time.thread_time


_RUNG = by_tier(lambda tier: tier.rung)
_IN_DDR = by_tier(lambda tier: tier.offloaded)
_HBM, _EVICTED = int(Tier.HBM), int(Tier.EVICTED)


class LiveExecutor:
    """Implements `arborsim.play.controller.Executor` on a decoder's cache.

    The forward passes have happened by the time the executor hears of their tokens.  `seconds` is a
    clock.  `moving_s` are the seconds that the host itself worked on moves to and from DDR:
    gathered, ordered copies and entered what had come.  They are exposed, as waits are.
    """

    def __init__(self, mover: Mover, seconds: Callable[[], float] = time.perf_counter) -> None:
        self._mover, self._seconds = mover, seconds
        self._cache = mover.cache
        self._tier = GrowingTable(mover.cache.layout.groups, np.int8)
        self._decoder: TreeDecoder | None = None
        self._measured = Measurements()
        self._began = self._seconds()
        self.moving_s = 0.0
        self.gauge = LiveGauge(mover)
        mover.on_peak = self.gauge.observe_peak

    def attach(self, decoder: TreeDecoder) -> None:
        """Recompute lost tokens with this decoder."""
        self._decoder = decoder
        self._began = self._seconds()

    @property
    def tier(self) -> np.ndarray:
        """Int8 ``[groups, tokens]``, of the tokens that the controller has been told of."""
        return self._tier.values

    def bind(self, tree: ThoughtTree) -> None:
        pass

    def prefill(self, run: TokenRun) -> None:
        self._tier.extend(run.num_tokens, Tier.HBM)
        self._measured.prompt_tokens = run.num_tokens
        self.gauge.observe(self.clock())

    def advance(self, run: TokenRun, moves: Moves) -> None:
        """The run has been decoded; carry out what was decided after its last iteration."""
        self._tier.extend(run.num_tokens, _HBM)
        self._measured.generated_tokens += run.num_tokens
        self._measured.iterations += run.steps
        self._measured.decisions += int(len(moves) > 0)
        assert not len(moves) or int(moves.step[0]) == run.steps - 1, "moves in the past"
        self.gauge.observe(self.clock())
        self._carry_out(moves)

    def activate(self, leaves: tuple[int, ...]) -> None:
        with self._moving():
            self._mover.activate()
        self.gauge.observe(self.clock())

    def apply(self, moves: Moves, examined_tokens: int, reads: np.ndarray | None = None) -> None:
        self._measured.decisions += 1
        if self._cache.select(reads):
            with self._moving():
                self._mover.activate()
            self.gauge.observe(self.clock())
        self._carry_out(moves)

    def finish(self) -> None:
        """Let transfers end; nothing waits for them any more, so they count as hidden."""
        exposed_s = self._mover.held_up.host_s
        self._mover.settle(wait=True)
        self._mover.held_up.host_s = exposed_s

    def clock(self) -> float:
        """Seconds since the search began."""
        return self._seconds() - self._began

    def measurements(self) -> Measurements:
        """Measurements so far; seconds of the model are added by `PolicySearch`."""
        m, link = self._measured, self._mover.link
        self.gauge.fill(m)
        m.to_ddr_bytes = link.downward.carried_bytes
        m.from_ddr_bytes = link.upward.carried_bytes
        waited_s = self._mover.held_up.seconds + self._cache.pass_exposed_s
        m.time.exposed_transfer_s = waited_s + self.moving_s
        busy_s = link.downward.busy_s + link.upward.busy_s
        m.time.hidden_transfer_s = max(0.0, busy_s - waited_s)
        return m

    def _carry_out(self, moves: Moves) -> None:
        if not len(moves):
            with self._moving():
                self._mover.settle(wait=False)
            return
        if self._evicted(moves):
            return
        pairs, target = self._spelled_out(moves)
        source = self.tier[pairs.group, pairs.token].copy()
        changed = source != target
        pairs, source, target = pairs.where(changed), source[changed], target[changed]
        if not len(pairs):
            return
        self._count(source, target)
        lost = source == Tier.EVICTED
        if lost.any():
            self._rehydrate(pairs.where(lost))
        self.tier[pairs.group, pairs.token] = target
        there = ~(lost & (target == Tier.HBM))
        with self._moving():
            self._mover.move(pairs.where(there), target[there])
        self.gauge.moved()
        self.gauge.observe(self.clock())

    def _evicted(self, moves: Moves) -> bool:
        """Evict, at a small part of the price, where there is nothing else to do.

        False if moves have another target, or tokens are elsewhere or in several groups.
        """
        tier, token, mover = self.tier, moves.token, self._mover
        alone = len(tier) == 1 and mover.held_in_hbm_alone and self._cache.stream is None
        if not alone or not (moves.target == _EVICTED).all():
            return False
        if (tier[0, token] == _EVICTED).any():
            return False
        tier[0, token] = _EVICTED
        self._measured.evicted_tokens += float(len(token))
        mover.evict(token)
        self.gauge.moved()
        self.gauge.observe(self.clock())
        return True

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        """Times what is done inside, but for waits, if anything is in DDR or on its way there."""
        held_up, begun = self._mover.held_up, self._seconds()
        waited_s, in_ddr = held_up.host_s, self._mover.anything_in_ddr
        yield
        if in_ddr or self._mover.anything_in_ddr:
            waited_s = waits_on(self._seconds) * (held_up.host_s - waited_s)
            self.moving_s += self._seconds() - begun - waited_s

    def _spelled_out(self, moves: Moves) -> tuple[GroupTokenPairs, np.ndarray]:
        """Every cell with its target; a move of all groups is one of each."""
        groups = self._cache.layout.groups
        every = moves.group == ALL_GROUPS
        times = np.where(every, groups, 1)
        token, target = np.repeat(moves.token, times), np.repeat(moves.target, times)
        group = np.repeat(moves.group.astype(np.int64), times)
        rank = np.arange(len(group)) - np.repeat(np.cumsum(times) - times, times)
        group = np.where(group == ALL_GROUPS, rank, group)
        return GroupTokenPairs(group, token.astype(np.int64)), target

    def _count(self, source: np.ndarray, target: np.ndarray) -> None:
        m, groups = self._measured, self._cache.layout.groups

        def tokens(pairs: np.ndarray) -> float:
            return int(np.count_nonzero(pairs)) / groups

        m.evicted_tokens += tokens(target == Tier.EVICTED)
        m.rehydrated_tokens += tokens(source == Tier.EVICTED)
        m.offloaded_tokens += tokens(~_IN_DDR[source] & _IN_DDR[target])
        m.quantised_tokens += tokens(_RUNG[target] > _RUNG[source])

    def _rehydrate(self, pairs: GroupTokenPairs) -> None:
        """One prefill per path over its lost tokens, from the root to the leaf."""
        assert self._decoder is not None
        begun = self._seconds()
        exposed_s = self._mover.held_up.host_s
        self._mover.restore(pairs)
        waiting = np.unique(pairs.token)
        leaves = list(self._cache.leaves)
        while len(waiting):
            if not leaves:  # of other paths: the token with the largest position ends one
                last = waiting[np.argmax(self._cache.position.values[waiting])]
                leaves = [int(self._cache.tree.node_of_token.values[last])]
            leaf = leaves.pop(0)
            path = self._cache.tree.path(leaf)
            now = np.isin(waiting, path, assume_unique=True)
            if now.any():
                self._decoder.recompute(leaf, waiting[now])
            waiting = waiting[~now]
        if self._cache.layout.device.type == "cuda":
            torch.cuda.synchronize(self._cache.layout.device)
        waited_s = waits_on(self._seconds) * (self._mover.held_up.host_s - exposed_s)
        self._measured.time.rehydration_s += self._seconds() - begun - waited_s
        self._measured.rehydrations += 1


_MOST_SAMPLES = 2048


class LiveGauge:
    """Peaks and a series of what a mover's cache holds.

    `allocated_bytes` is the largest size of the pools' tensors on the device, with gaps.
    """

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self.allocated_bytes = 0
        self._on_device: list[Pool] | None = None
        self._peak_hbm = self._peak_tokens = self._peak_ddr = 0
        self._peak_quantised = self._peak_staging = 0
        self._peak_after: int | None = None  # since the first decision that moved something
        self._byte_s, self._held, self._held_since = 0.0, 0, 0.0
        self._samples: list[tuple[float, int, int, int, int]] = []
        self._every = 1
        self._seen = 0

    def observe(self, time_s: float) -> None:
        """Look at the pools."""
        hbm = ddr = staging = quantised = held = 0
        for place, pool in self._mover.cache.pools.items():
            if not pool.slots.total:
                continue
            size = pool.used_bytes
            if place.staged:
                staging += size
                continue
            quantised += size if place.quantised else 0  # on the host, too
            if place.on_host:
                ddr += size
            else:
                hbm += size
                held += pool.slots.total
        buffers = self._mover.cache.buffer_bytes
        staging += buffers
        if ddr:  # where what leaves has its rows already
            held -= int(self._mover.leaving_tokens.sum())
        self._note_peak(hbm + staging)
        self._byte_s += self._held * (time_s - self._held_since)
        self._held, self._held_since = hbm + staging, time_s
        mean = -(-held // self._mover.cache.layout.groups)
        self._peak_tokens = max(self._peak_tokens, mean)
        self._peak_ddr = max(self._peak_ddr, ddr)
        self._peak_quantised = max(self._peak_quantised, quantised)
        self._peak_staging = max(self._peak_staging, staging)
        self._note_allocated(buffers)
        if self._seen % self._every == 0:
            flying = self._mover.in_flight_bytes
            self._samples.append((time_s, hbm - flying, staging, flying, ddr))
            if len(self._samples) > _MOST_SAMPLES:
                del self._samples[1::2]
                self._every *= 2
        self._seen += 1

    def observe_peak(self) -> None:
        """The device holds more than before or after: see `Mover.on_peak`."""
        pools = self._mover.cache.pools
        buffers = self._mover.staging_in_flight_bytes + self._mover.cache.buffer_bytes
        staging = buffers + sum(p.used_bytes for place, p in pools.items() if place.staged)
        hbm = sum(pool.used_bytes for place, pool in pools.items() if place.in_hbm)
        self._note_peak(staging + hbm)
        self._peak_staging = max(self._peak_staging, staging)
        self._note_allocated(buffers)

    def moved(self) -> None:
        """A decision has moved or destroyed something."""
        if self._peak_after is None:
            self._peak_after = 0

    def _note_peak(self, held: int) -> None:
        self._peak_hbm = max(self._peak_hbm, held)
        if self._peak_after is not None:
            self._peak_after = max(self._peak_after, held)

    def _note_allocated(self, buffer_bytes: int) -> None:
        pools = self._mover.cache.pools
        if self._on_device is None:
            self._on_device = [pool for place, pool in pools.items() if not place.on_host]
        allocated = buffer_bytes
        for pool in self._on_device:
            allocated += pool.capacity_bytes
        self.allocated_bytes = max(self.allocated_bytes, allocated)

    def fill(self, m: Measurements) -> None:
        """Write peaks and the series into `m`."""
        m.peak_hbm_kv_bytes = self._peak_hbm
        after = self._peak_after
        m.peak_after_first_decision_bytes = self._peak_hbm if after is None else after
        m.hbm_byte_seconds = self._byte_s
        m.peak_hbm_kv_tokens = self._peak_tokens
        m.peak_ddr_bytes = self._peak_ddr
        m.peak_quantised_bytes = self._peak_quantised
        m.peak_staging_bytes = self._peak_staging
        names = ("time_s", "hbm_kv_bytes", "staging_bytes", "in_flight_bytes", "ddr_bytes")
        for i, name in enumerate(names):
            getattr(m.series, name)[:] = [sample[i] for sample in self._samples]


def device_peak_bytes(device: torch.device) -> int:
    """Largest memory that PyTorch's allocator has held since it was last reset; 0 on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
