"""The searches that decode together: sums of their linear pieces, and iterations in closed form.

All terms of `arborsim.machine.price` are linear between the ends of pieces, so a run of iterations
is a few arithmetic series.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from arborsim.machine.integration import NO_LONGER, Longer
from arborsim.machine.price import Price
from arborsim.machine.program import NOTHING, Extra, Piece

_REBUILD = 4096  # changes of the sums after which they are added up afresh: rounding stays rounding


@dataclass(slots=True)
class Span:
    """A run of iterations."""

    seconds: float = 0.0
    hbm_byte_s: float = 0.0  # bytes held by the batch's pieces, times seconds
    flops_s: float = 0.0  # what computing, and reading memory, take by themselves
    memory_s: float = 0.0
    exposed_s: float = 0.0  # waited for streaming or attention on the CPU ...
    policy_s: float = 0.0  # ... and for policies
    prefill_s: float = 0.0  # by how much parts of prompts made it longer


@dataclass(slots=True)
class Sums:
    """Sums over the batch by part, for its next iteration, and their growth per iteration."""

    compute: float = 0.0
    compute_g: float = 0.0
    kv: float = 0.0
    kv_g: float = 0.0
    dequantise: float = 0.0
    dequantise_g: float = 0.0
    serial: float = 0.0
    serial_g: float = 0.0
    policy: float = 0.0
    policy_g: float = 0.0
    kv_tokens: float = 0.0
    kv_tokens_g: float = 0.0
    hbm: int = 0
    hbm_g: int = 0
    stream: float = 0.0
    link: float = 0.0
    near: float = 0.0
    nears: int = 0
    streamed_bytes: int = 0
    down_bytes: int = 0
    up_bytes: int = 0
    sequences: int = 0
    #: Searches by that of their policy
    longer: dict[Longer, int] = field(default_factory=dict)
    launch: float = 0.0

    def longest(self) -> Longer:
        """The largest of each over the searches' policies."""
        if not self.longer:
            return NO_LONGER
        one_s, several_s = map(max, zip(*self.longer, strict=True))
        return Longer(one_s, several_s)

    def add(self, piece: Piece, i: int, sign: int) -> None:
        """Let a search in iteration `i` of `piece` in (sign 1) or out (-1)."""
        first, growth = piece.compute_s
        self.compute += sign * (first + i * growth)
        self.compute_g += sign * growth
        first, growth = piece.kv_s
        self.kv += sign * (first + i * growth)
        self.kv_g += sign * growth
        first, growth = piece.dequantise_s
        if first or growth:
            self.dequantise += sign * (first + i * growth)
            self.dequantise_g += sign * growth
        first, growth = piece.serial_s
        if first or growth:
            self.serial += sign * (first + i * growth)
            self.serial_g += sign * growth
        first, growth = piece.policy_s
        if first or growth:
            self.policy += sign * (first + i * growth)
            self.policy_g += sign * growth
        first, growth = piece.kv_tokens
        if first or growth:
            self.kv_tokens += sign * (first + i * growth)
            self.kv_tokens_g += sign * growth
        held, grows = piece.hbm_bytes
        self.hbm += sign * (held + i * grows)
        self.hbm_g += sign * grows
        self.sequences += sign * piece.sequences
        if any(piece.longer):
            searches = self.longer.get(piece.longer, 0) + sign
            self.longer[piece.longer] = searches
            if not searches:
                del self.longer[piece.longer]
        if piece.launch_s:
            self.launch += sign * piece.launch_s
        if piece.streamed_bytes or piece.near_s:
            self._add_side(piece, sign)

    def _add_side(self, piece: Piece, sign: int) -> None:
        """Add what goes on next to the GPU's work; sums of nothing are 0, without rounding."""
        self.down_bytes += sign * piece.down_bytes
        self.up_bytes += sign * piece.up_bytes
        if piece.streamed_bytes:
            self.streamed_bytes += sign * piece.streamed_bytes
            self.stream = self.stream + sign * piece.stream_s if self.streamed_bytes else 0.0
            self.link = self.link + sign * piece.link_s if self.streamed_bytes else 0.0
        if piece.near_s:
            self.nears += sign
            self.near = self.near + sign * piece.near_s if self.nears else 0.0

    def advance(self, k: int) -> None:
        """`k` iterations have passed."""
        self.compute += k * self.compute_g
        self.kv += k * self.kv_g
        self.dequantise += k * self.dequantise_g
        self.serial += k * self.serial_g
        self.policy += k * self.policy_g
        self.kv_tokens += k * self.kv_tokens_g
        self.hbm += k * self.hbm_g


class IterationTime:
    """The time of a batch's iterations, given its sums."""

    def __init__(self, price: Price) -> None:
        #: What streaming takes at least, if it does anything: the NVMe may be slower than the link.
        self.stream_floor_s = 0.0
        self._weights_s = price.weights_s  # of n tokens
        self._busy_s = price.products_busy_s
        self._pass_s = price.pass_s
        self._attention_s = price.attention_s
        self._knots = price.attention_knots
        self._measured = price.measured
        self._launch_s = price.launch_s
        self._policy_launch_s = price.policy_launch_s
        self._overlap = price.overlap

    def terms(self, s: Sums, i: float, extra: Extra = NOTHING) -> tuple[float, float, float]:
        """Seconds of iteration `i` from now: in all, exposed, and of the policies."""
        decode = self._decode_s(s, i, extra)
        exposed = 0.0
        stream = max(s.stream, self.stream_floor_s) if s.streamed_bytes else 0.0
        if stream > decode:
            exposed = stream - decode
        if s.near:
            exposed += max(0.0, self._near_gap_s(s, i))
        policy = s.policy + i * s.policy_g + extra.policy_s
        return decode + policy + exposed, exposed, policy

    def _decode_s(self, s: Sums, i: float, extra: Extra = NOTHING) -> float:
        compute = s.compute + i * s.compute_g + extra.compute_s
        memory = self._memory_s(s, i, extra)
        longer, shorter = (compute, memory) if compute > memory else (memory, compute)
        decode = longer + (1.0 - self._overlap) * shorter + s.dequantise + i * s.dequantise_g
        decode += self._pass_s(s.sequences, extra.tokens, extra.prompts, s.longest())
        decode += s.serial + i * s.serial_g + extra.serial_s
        return max(decode, self._least_s(s))

    def _least_s(self, s: Sums) -> float:
        """Launching the kernels of an iteration, those of its policies included."""
        if not self._launch_s:
            return s.launch
        return self._launch_s + s.launch + self._policy_launch_s(s.longest())

    def _memory_s(self, s: Sums, i: float, extra: Extra = NOTHING) -> float:
        """Reading weights, keys and values; with measured kernels, attention."""
        if self._measured:
            if not s.sequences:
                return 0.0
            return self._attention_s(s.sequences, s.kv_tokens + i * s.kv_tokens_g)
        return self._weights_s(s.sequences + extra.tokens) + s.kv + i * s.kv_g + extra.kv_s

    def _near_gap_s(self, s: Sums, i: float) -> float:
        """By how much the CPU's attention takes longer than the GPU's."""
        attention = s.kv + i * s.kv_g
        if self._measured:
            attention = self._memory_s(s, i)
        return s.near - attention - s.dequantise - i * s.dequantise_g

    def span(self, s: Sums, k: int) -> Span:
        """The next `k` iterations."""
        bends = self._bends(s, k) if k > 1 else (0, 1)
        out = Span()
        for first, last in pairwise(bends):
            n = last - first
            total, exposed, policy = self.terms(s, first)
            if n == 1:
                growth = 0.0
                out.seconds += total
                out.exposed_s += exposed
                out.policy_s += policy
            else:
                end, end_exposed, end_policy = self.terms(s, last - 1)
                growth = (end - total) / (n - 1)
                out.seconds += n * (total + end) / 2
                out.exposed_s += n * (exposed + end_exposed) / 2
                out.policy_s += n * (policy + end_policy) / 2
            held = s.hbm + first * s.hbm_g
            out.hbm_byte_s += (
                n * held * total
                + (held * growth + s.hbm_g * total) * (n * (n - 1) / 2)
                + s.hbm_g * growth * (n * (n - 1) * (2 * n - 1) / 6)
            )
        out.flops_s = k * s.compute + s.compute_g * (k * (k - 1) / 2)
        if self._measured:
            computing_s, reading_s = self._busy_s(s.sequences, s.sequences)
            out.flops_s += k * computing_s
            out.memory_s = k * reading_s
            for first, last in pairwise(bends):
                both = self._memory_s(s, first) + self._memory_s(s, last - 1)
                out.memory_s += (last - first) * both / 2
        else:
            weights_s = self._weights_s(s.sequences)
            out.memory_s = k * (weights_s + s.kv) + s.kv_g * (k * (k - 1) / 2)
        return out

    def one(self, s: Sums, extra: Extra = NOTHING) -> Span:
        """The next iteration, with something that joins it."""
        total, exposed, policy = self.terms(s, 0, extra)
        flops = s.compute + extra.compute_s
        memory = self._memory_s(s, 0, extra)
        ends = s.sequences + extra.prompts
        computing_s, reading_s = self._busy_s(s.sequences + extra.tokens, ends)
        flops, memory = flops + computing_s, memory + reading_s
        prefill = 0.0
        if extra.tokens:
            decode = self.terms(s, 0)[0] if s.sequences else 0.0
            prefill = max(0.0, total - extra.policy_s - decode)
        return Span(total, s.hbm * total, flops, memory, exposed, policy, prefill)

    def seconds(self, s: Sums, k: int) -> float:
        """Seconds of the next `k` iterations."""
        bends = self._bends(s, k)
        total = 0.0
        for first, last in pairwise(bends):
            a = self.terms(s, first)[0]
            b = self.terms(s, last - 1)[0]
            total += (last - first) * (a + b) / 2
        return total

    def _bends(self, s: Sums, k: int) -> list[int]:
        """Iterations from which the time is linear up to the next one; 0 and `k` included."""
        bends = {0, k}
        if self._measured:
            self._cross_knots(s, k, bends)
        self._cross_each(lambda i: s.compute + i * s.compute_g - self._memory_s(s, i), bends)
        if s.near:
            self._cross_each(lambda i: self._near_gap_s(s, i), bends)
        if self._launch_s:
            least_s = self._least_s(s) * (1 + 1e-9)
            self._cross_each(lambda i: self._decode_s(s, i) - least_s, bends)
        if s.streamed_bytes:
            stream = max(s.stream, self.stream_floor_s)
            self._cross_each(lambda i: stream - self._decode_s(s, i), bends)
        return sorted(bends)

    def _cross_knots(self, s: Sums, k: int, bends: set[int]) -> None:
        """The first iterations after the bends of attention's curve."""
        growth = s.kv_tokens_g
        if not growth:
            return
        knots = self._knots(s.sequences)
        low, high = sorted((s.kv_tokens, s.kv_tokens + (k - 1) * growth))
        for knot in knots[bisect_right(knots, low) : bisect_left(knots, high)]:
            i = math.ceil((knot - s.kv_tokens) / growth)
            if 0 < i < k:
                bends.add(i)

    def _cross_each(self, value: Callable[[int], float], bends: set[int]) -> None:
        """Where a value that is linear between bends changes its sign, add the iteration after."""
        for first, last in pairwise(sorted(bends)):
            if last - first < 2:
                continue
            start, end = value(first), value(last - 1)
            self._cross(start, (end - start) / (last - 1 - first), first, last, bends)

    @staticmethod
    def _cross(value: float, growth: float, first: int, last: int, bends: set[int]) -> None:
        """Where ``value + (i - first) growth`` changes its sign, add the first iteration after."""
        if growth and value * growth < 0:
            i = first + math.ceil(-value / growth)
            if first < i < last:
                bends.add(i)


class Batch:
    """Members of the batch, by a key, with a heap of the ends of their pieces."""

    def __init__(self) -> None:
        self.sums = Sums()
        self.iteration = 0  # since the engine started
        self._members: dict[int, tuple[Piece, int, int]] = {}  # piece, its start, its ticket
        self._ends: list[tuple[int, int, int]] = []  # iteration, ticket, key
        self._ticket = 0
        self._changes = 0

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, key: int) -> bool:
        return key in self._members

    def add(self, key: int, piece: Piece, i: int = 0) -> None:
        """A search decodes from iteration `i` of `piece` on."""
        start = self.iteration - i
        self._ticket += 1
        self._members[key] = (piece, start, self._ticket)
        heapq.heappush(self._ends, (start + piece.iterations, self._ticket, key))
        self.sums.add(piece, i, 1)
        self._changed()

    def remove(self, key: int) -> int:
        """A search stops decoding; returns the iterations of its piece that it has done."""
        piece, start, _ = self._members.pop(key)
        done = self.iteration - start
        self.sums.add(piece, done, -1)
        self._changed()
        return done

    def next_end(self) -> int:
        """Iterations until the next piece ends."""
        ends, members = self._ends, self._members
        while True:
            at, ticket, key = ends[0]
            member = members.get(key)
            if member is not None and member[2] == ticket:
                return at - self.iteration
            heapq.heappop(ends)

    def advance(self, k: int) -> None:
        """`k` iterations have passed."""
        self.iteration += k
        self.sums.advance(k)

    def ended(self) -> list[int]:
        """Take out the searches whose pieces have ended, in the order in which they joined."""
        found = []
        while self._ends and self._ends[0][0] <= self.iteration:
            _, ticket, key = heapq.heappop(self._ends)
            member = self._members.get(key)
            if member is not None and member[2] == ticket:
                found.append(key)
                del self._members[key]
                self.sums.add(member[0], member[0].iterations, -1)
                self._changed()
        return found

    def _changed(self) -> None:
        self._changes += 1
        if not self._members or self._changes % _REBUILD == 0:
            self.sums = Sums()
            for piece, start, _ in self._members.values():
                self.sums.add(piece, self.iteration - start, 1)
