"""An executor under which nothing moves: it notes from which token on queries read what."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from arborsim.core.errors import UsageError
from arborsim.core.events import TokenRun
from arborsim.core.measurements import Measurements
from arborsim.core.tiers import MOST_TIERS, Tier, by_tier
from arborsim.core.tree import GrowingTable, ThoughtTree
from arborsim.memory.moves import Changes, Moves, kinds, resolve
from arborsim.policies.base import Policy
from arborsim_torch.cache.layout import Layout
from arborsim_torch.tiers.codec import Codec, codec_of

_EVICTED = kinds(lambda a, b: b is Tier.EVICTED)
_QUANTISED = kinds(lambda a, b: b.rung > a.rung)
_OFFLOADED = kinds(lambda a, b: b.offloaded and not a.offloaded)
_RUNG = by_tier(lambda tier: tier.rung)
_NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Rounding:
    """Tokens that take another format; queries from position `first` on read them so."""

    first: int
    codec: Codec
    group: np.ndarray  # int64 [n]
    token: np.ndarray  # int64 [n]


class MaskedExecutor:
    """Implements `arborsim.play.controller.Executor` for one search in a table.

    `roundings` are in the order of decisions; who carries them out empties the list.
    """

    def __init__(self, layout: Layout, policy: Policy) -> None:
        self.layout, groups = layout, layout.groups
        self._tier, self._lost = GrowingTable(groups, np.int8), GrowingTable(groups, np.int32)
        self._codecs = [codec_of(each, layout.head_dim) for each in policy.formats]
        self._held = np.zeros(MOST_TIERS, dtype=np.int64)  # of the cells of all groups, by tier
        cell = layout.layers * layout.kv_heads // groups
        plain = 2 * layout.head_dim * layout.dtype.itemsize
        sizes = [plain, *(codec.bytes_per_token(layout.head_dim) for codec in self._codecs)]
        self._bytes = by_tier(
            lambda t: 0 if t is Tier.EVICTED else cell * sizes[min(t.rung, len(self._codecs))]
        )
        self._reads: list[tuple[int, np.ndarray | None]] = []  # first position, and what is read
        self.roundings: list[Rounding] = []
        self._measured = Measurements()

    @property
    def tier(self) -> np.ndarray:
        return self._tier.values

    def bind(self, tree: ThoughtTree) -> None: ...
    def activate(self, leaves: tuple[int, ...]) -> None: ...
    def finish(self) -> None: ...

    def clock(self) -> float:
        return time.perf_counter()

    def measurements(self) -> Measurements:
        return self._measured

    def prefill(self, run: TokenRun) -> None:
        self._measured.prompt_tokens = run.num_tokens
        self.arrive(run.num_tokens)

    def advance(self, run: TokenRun, moves: Moves) -> None:
        self._measured.generated_tokens += run.num_tokens
        done = 0
        for step in np.unique(moves.step).tolist():
            self.arrive(step + 1 - done)
            self._carry_out(moves.between_steps(step, step + 1))
            done = step + 1
        self.arrive(run.steps - done)

    def apply(self, moves: Moves, examined_tokens: int, reads: np.ndarray | None = None) -> None:
        self._carry_out(moves)
        if reads is not None or self._reads:
            self._reads.append((self.tier.shape[1], reads))

    def arrive(self, tokens: int) -> None:
        """New tokens are in HBM."""
        self._tier.extend(tokens, Tier.HBM)
        self._lost.extend(tokens, _NEVER)
        self._held[Tier.HBM] += tokens * len(self.tier)
        self._look()

    def _look(self) -> None:
        m, held = self._measured, self._held
        m.peak_hbm_kv_tokens = max(
            m.peak_hbm_kv_tokens, -(-int(held[: Tier.DDR].sum()) // len(self.tier))
        )
        sizes = held * self._bytes
        m.peak_hbm_kv_bytes = max(m.peak_hbm_kv_bytes, int(sizes[: Tier.DDR].sum()))
        m.peak_ddr_bytes = max(m.peak_ddr_bytes, int(sizes[Tier.DDR : Tier.EVICTED].sum()))

    def _carry_out(self, moves: Moves) -> None:
        changes = resolve(moves, self.tier)
        if not len(changes):
            return
        if (changes.source == Tier.EVICTED).any():
            raise UsageError("masked runs recompute nothing: run this policy live")
        m, groups = self._measured, len(self.tier)
        m.evicted_tokens += changes.count(_EVICTED) / groups
        m.quantised_tokens += changes.count(_QUANTISED) / groups
        m.offloaded_tokens += changes.count(_OFFLOADED) / groups
        flow = changes.flow.reshape(MOST_TIERS, MOST_TIERS)
        self._held += flow.sum(0) - flow.sum(1)
        moves.carry_out(self.tier)
        lost = changes.of(_EVICTED)
        self._lost.values[lost.group, lost.token] = self.tier.shape[1]
        self._round(changes.of(_QUANTISED))
        self._look()

    def _round(self, changes: Changes) -> None:
        rung = _RUNG[changes.target]
        for kind in np.unique(rung).tolist():
            own = changes.where(rung == kind)
            codec = self._codecs[min(kind, len(self._codecs)) - 1]
            self.roundings.append(Rounding(self.tier.shape[1], codec, own.group, own.token))

    def rounded(self, codec: Codec, vectors: Tensor) -> Tensor:
        """Keys and values ``[2, KV heads, tokens, head_dim]`` as a format gives them back."""
        data, scale = codec.encode(vectors)
        together = getattr(codec, "scale_tokens", 1)
        if scale is not None and together > 1:  # each token with its group's scales, and its number
            number = torch.arange(vectors.shape[2], dtype=torch.int16) % together
            number = number.view(torch.uint8).view(1, 1, -1, 2).expand(1, vectors.shape[1], -1, 2)
            scale = torch.cat([scale.repeat_interleave(together, 2), number], dim=-1)
        return codec.decode(data, scale, vectors.dtype)

    def unread(self, first: int, count: int) -> np.ndarray:
        """Tokens that queries at `first` and the next positions leave out, of all before them.

        Bool ``[groups, count, first + count]``; decisions that have not been taken take nothing.
        """
        end = first + count
        lost = self._lost.values[:, :end]
        at = np.arange(first, end)
        found = np.ones((len(lost), count, end), dtype=bool)
        known = lost.shape[1]
        found[..., :known] = lost[:, None] <= at[:, None]
        found[..., known:] = False
        found |= np.arange(end) > at[:, None]
        starts = [min(max(start, first), end) - first for start, _ in self._reads]
        for (_, read), start, stop in zip(self._reads, starts, [*starts, count][1:], strict=True):
            if read is not None and start < stop:
                found[:, start:stop, : read.shape[1]] |= ~read[:, None]
        return found

    def forget(self, position: int) -> None:
        """Choices of what to read that no query from this position on follows."""
        while len(self._reads) > 1 and self._reads[1][0] <= position:
            self._reads.pop(0)

    def readable(self, tokens: np.ndarray) -> np.ndarray:
        """Whether each token can be read now: bool ``[layers, KV heads, n]``; new ones can."""
        known = tokens < self.tier.shape[1]
        held = np.ones((len(self.tier), len(tokens)), dtype=bool)
        held[:, known] = self.tier[:, tokens[known]] != Tier.EVICTED
        now = self._reads[-1][1] if self._reads else None
        if now is not None:
            old = tokens < now.shape[1]
            held[:, old] &= now[:, tokens[old]]
        layers = self.layout.layers
        shape = (layers, self.layout.kv_heads, len(tokens))
        return np.asarray(
            np.broadcast_to(held.reshape(min(layers, len(held)), -1, shape[2]), shape)
        )
