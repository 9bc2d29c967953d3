"""Meters: figures taken while a search is replayed, without a part in its decisions.

`AttentionKept` and `OutputError` are two of the levels of quality.  `Quality` says which figures to
take, and what must be read for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.formats import FP8, Format
from arborsim.core.head_rows import HeadRows
from arborsim.core.observations import (
    AttentionRows,
    DenseRows,
    Observations,
    Signal,
    SparseRows,
    in_float64,
)
from arborsim.core.tiers import Tier, by_tier
from arborsim.core.tree import ThoughtTree
from arborsim.memory.moves import ALL_GROUPS, Moves
from arborsim.play.controller import Meter
from arborsim.signals.rows import LeafPaths, head_rows
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import VECTORS

_RUNG = by_tier(lambda tier: tier.rung)
_ROWS_AT_ONCE = 512  # rows of a few hundred positions: their arrays stay in the processor's cache


#: What attention kept is measured on by grouping of the cache, the best first.
_ROWS = {
    "shared": (Signal.ATTENTION,),
    "layer": (Signal.HEAD_ATTENTION, Signal.LAYER_ATTENTION),
    "head": (Signal.HEAD_ATTENTION,),
}


class _ReadMeter(Meter):
    """Knows which tokens plans left out of reading (`Plan.reads`)."""

    _reads: np.ndarray | None = None  # bool [groups, tokens at the last plan]

    def moved(self, moves: Moves, tier: np.ndarray, reads: np.ndarray | None = None) -> None:
        self._reads = reads

    def _read(self, tier: np.ndarray) -> np.ndarray:
        """The tiers, with tokens that are not read as evicted: to attention they are the same."""
        if self._reads is None:
            return tier
        tier = tier.copy()
        tier[:, : self._reads.shape[1]][~self._reads] = Tier.EVICTED
        return tier


class AttentionKept(_ReadMeter):
    """Share of the recorded attention of generated tokens that falls on tokens that are read.

    The recording saw the whole cache: what it attended to and the policy has evicted, or does not
    read, is lost.  Each row is a distribution, so rows weigh the same: what a row loses is a share
    of what the row itself sums to, which float16 leaves a little above or below 1.

    `rows` names what it is measured on.  One group: the mean row over all layers and heads
    (`Signal.ATTENTION`).  Several groups: each on its own rows, the mean over the query heads that
    read it, of the captured layers (`Signal.HEAD_ATTENTION`, or for groups that are layers
    `Signal.LAYER_ATTENTION`).  A row of theirs that is not a number (a softmax that overflowed) is
    left out.
    """

    def __init__(self, rows: Signal = Signal.ATTENTION) -> None:
        self._source = rows
        self._lost = 0.0
        self._rows = 0

    @property
    def share(self) -> float:
        """In [0, 1], or NaN if nothing was generated."""
        return 1.0 - self._lost / self._rows if self._rows else float("nan")

    def ran(self, run: TokenRun, tree: ThoughtTree, tier: np.ndarray, moves: Moves) -> None:
        tier = self._read(tier)
        if self._source is not Signal.ATTENTION:
            self._by_group(run, tree, tier, moves)
            return
        gone = tier == Tier.EVICTED
        assert len(gone) == 1, "the mean row says nothing about single groups"
        self._rows += run.num_tokens
        evicts = moves.target == Tier.EVICTED
        if not gone.any() and not evicts.any():
            return
        step, token = moves.step[evicts], moves.token[evicts]
        assert run.observed.attention is not None, "the reader was not asked for attention"
        attention = run.observed.attention.summed()
        if isinstance(attention, SparseRows):
            gone_from = np.full(tree.num_tokens, run.steps, dtype=np.int32)
            gone_from[: gone.shape[1]][gone[0]] = 0
            gone_from[token] = step + 1
            on_paths = [gone_from[tree.path(leaf)] for leaf in run.leaves]
            self._lost += _lost_of_sparse(attention, on_paths, run.steps)
            return
        lost_at = np.concatenate([gone[0], np.zeros(run.num_tokens)])
        self._lost += _lost_of_dense(attention, LeafPaths(run, tree), lost_at, step, token)

    def _by_group(self, run: TokenRun, tree: ThoughtTree, tier: np.ndarray, moves: Moves) -> None:
        groups = len(tier)
        tier = np.concatenate([tier, np.zeros((groups, run.num_tokens), dtype=np.int8)], axis=1)
        paths = LeafPaths(run, tree)
        for step in range(run.steps):
            for leaf in range(len(paths)):
                mass = self._mass(run.observed, step * len(paths) + leaf, groups)
                held = tier[:, paths.tokens(leaf, mass.shape[2])]
                lost = lost_share(mass, held == Tier.EVICTED)
                known = ~np.isnan(lost)
                self._lost += float(lost[known].sum())
                self._rows += int(np.count_nonzero(known))
            moves.between_steps(step, step + 1).carry_out(tier)

    def _mass(self, observed: Observations, token: int, groups: int) -> np.ndarray:
        """Rows of each group's heads, ``[groups, heads, positions]`` (a layer's mean is one)."""
        if self._source is Signal.HEAD_ATTENTION:
            row = head_rows(observed).row(token)
        else:
            assert observed.layer_attention is not None, "the reader was not asked for layers' rows"
            row = observed.layer_attention.of(token)[:, :1]
        return row.reshape(groups, -1, row.shape[2])


def _sums(rows: AttentionRows) -> np.ndarray:
    """The sum of each row, float64 ``[rows]``."""
    assert rows.sums is not None
    return rows.sums


def lost_share(mass: np.ndarray, gone: np.ndarray) -> np.ndarray:
    """Share of one query's attention to what is gone, by group: mean over its heads' rows.

    `mass` is ``[groups, heads, positions]``, `gone` bool ``[groups, positions]``.  The result is
    float64 ``[groups]``, NaN for groups none of whose heads has numbers.
    """
    weights = mass.astype(np.float64)
    lost = np.matmul(weights, gone[:, :, None].astype(np.float64))[:, :, 0]
    lost /= weights.sum(axis=2)
    known = ~np.isnan(lost)
    total, count = np.where(known, lost, 0.0).sum(axis=1), known.sum(axis=1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _lost_of_dense(
    rows: DenseRows, paths: LeafPaths, lost_at: np.ndarray, step: np.ndarray, token: np.ndarray
) -> float:
    """Attention of a run's rows to what is gone, as shares of the rows.

    `lost_at`, float64 ``[tokens]``, is 1 for what is gone before the run.  `token` goes after
    iterations `step`.
    """
    steps, tokens = step.tolist(), token.tolist()
    following, width, lost = 0, len(paths), []
    first = 0 if lost_at.any() else width * steps[0]  # nothing is lost before
    for number, row in enumerate(rows[first:], first):
        now, leaf = divmod(number, width)
        while following < len(steps) and steps[following] < now:
            lost_at[tokens[following]] = 1.0
            following += 1
        lost.append(float(row.dot(lost_at[paths.tokens(leaf, len(row))])))
    return float((np.asarray(lost) / _sums(rows)[first:]).sum())


def _lost_of_sparse(rows: SparseRows, gone_from: Sequence[np.ndarray], steps: int) -> float:
    """The same of sparse rows, many at once: a row of each path in turn.

    `gone_from` has, for each path, the first iteration for which each position is gone, int32
    ``[positions]``, or `steps`.
    """
    count, width, listed = len(rows), len(gone_from), np.diff(rows.offsets)
    step, of_path = np.divmod(np.arange(count, dtype=np.int32), np.int32(width))
    begins = np.cumsum([0, *map(len, gone_from)], dtype=np.int32)[of_path]
    every = np.concatenate(gone_from)
    gone_listed, per_sum = np.zeros(count), 1.0 / _sums(rows)
    lost = 0.0
    for first in range(0, count, _ROWS_AT_ONCE):
        last = min(first + _ROWS_AT_ONCE, count)
        a, b = int(rows.offsets[first]), int(rows.offsets[last])
        row = np.repeat(np.arange(first, last, dtype=np.int32), listed[first:last])
        hit = every.take(rows.index[a:b] + begins.take(row)) <= step.take(row)
        lost += float(np.dot(in_float64(rows.value[a:b]), hit * per_sum.take(row)))
        ends = np.concatenate([[0], np.cumsum(hit)])[rows.offsets[first : last + 1] - a]
        gone_listed[first:last] = np.diff(ends)
    gone = (np.cumsum(np.bincount(path, minlength=steps)[:steps]) for path in gone_from)
    others = np.maximum(rows.lengths - listed, 1)
    share = np.where(rows.lengths > listed, rows.rest / others, 0.0)
    gone_others = np.stack([*gone], axis=1).ravel() - gone_listed
    return lost + float((share * gone_others * per_sum).sum())


class OutputError(_ReadMeter):
    """Relative error of the attention output of generated tokens, on the captured layers.

    For every generated token and captured layer the output over all recorded tokens, ``o = P V``,
    is compared with ``o'``, for which tokens not read are missing (their share of the softmax goes
    to the others) and quantised tokens have keys and values rounded as `formats`, those of the
    policy, round them from full precision.  The error is ``||o - o'|| / ||o||`` over the heads of a
    layer, averaged over layers and tokens.

    The queries are the recorded ones: how an error changes later layers and tokens is not in it.
    """

    def __init__(self, formats: tuple[Format, ...] = (FP8,)) -> None:
        self._formats = formats
        self._grouped: dict[int, np.ndarray] = {}  # by rung, of keys rounded in groups of tokens
        self._keys: list[np.ndarray] = []  # one per run, [tokens, layers, KV heads, head_dim]
        self._values: list[np.ndarray] = []
        self._sum = 0.0
        self._rows = 0

    @property
    def error(self) -> float:
        """At least 0, or NaN if nothing was generated."""
        return self._sum / self._rows if self._rows else float("nan")

    def prefilled(self, run: TokenRun) -> None:
        observed = run.observed
        assert observed.keys is not None, "the reader was not asked for keys"
        assert observed.values is not None, "the reader was not asked for values"
        self._keys.append(observed.keys)
        self._values.append(observed.values)

    def moved(self, moves: Moves, tier: np.ndarray, reads: np.ndarray | None = None) -> None:
        super().moved(moves, tier, reads)
        for rung, each in enumerate(self._formats, 1):
            mine = _RUNG[moves.target] == rung
            if each.scale_tokens > 1 and mine.any():
                self._round_groups(rung, moves.group[mine], moves.token[mine], len(tier))

    def _round_groups(self, rung: int, group: np.ndarray, token: np.ndarray, groups: int) -> None:
        """Note how rounding changes keys whose tokens stand group by group."""
        self._keys = [np.concatenate(self._keys)]
        keys = self._keys[0]
        change = self._grouped.get(rung, np.zeros((0, *keys.shape[1:]), dtype=np.float32))
        more = np.zeros((len(keys) - len(change), *keys.shape[1:]), dtype=np.float32)
        change = self._grouped[rung] = np.concatenate([change, more])
        layers, heads = keys.shape[1:3]
        for one in np.unique(group).tolist():
            at = token[group == one]
            exact = keys[at].astype(np.float32).transpose(1, 2, 0, 3)
            rounded = self._formats[rung - 1].rounded(exact, keys=True) - exact
            rounded = rounded.transpose(2, 0, 1, 3)
            cells = np.ones((layers, heads), dtype=bool)
            if one != ALL_GROUPS and groups > 1:
                cells = (np.arange(layers * heads) * groups // (layers * heads) == one).reshape(
                    layers, heads
                )
            change[at] = np.where(cells[:, :, None], rounded, change[at])

    def ran(self, run: TokenRun, tree: ThoughtTree, tier: np.ndarray, moves: Moves) -> None:
        self.prefilled(run)  # the run's own tokens have vectors too
        self._rows += run.num_tokens
        tier = self._read(tier)
        if not tier.any() and not len(moves):
            return
        rows = run.observed.head_attention
        assert rows is not None, "the reader was not asked for the attention of heads"
        fresh = np.zeros((len(tier), run.num_tokens), dtype=np.int8)
        tier = np.concatenate([tier, fresh], axis=1)
        self._keys = [np.concatenate(self._keys)]
        self._values = [np.concatenate(self._values)]
        there = set(_RUNG[np.unique(np.concatenate([tier.ravel(), moves.target]))].tolist()) - {0}
        vectors = _Vectors(self._keys[0], self._values[0], self._formats, there, self._grouped)
        paths = [tree.path(leaf) for leaf in run.leaves]
        for step in range(run.steps):
            for w, path in enumerate(paths):
                self._sum += _token_error(rows, step * len(paths) + w, path, tier, vectors)
            moves.between_steps(step, step + 1).carry_out(tier)


class _Vectors:
    """Values of all tokens, and by rung values and changes of keys as formats round them."""

    def __init__(
        self,
        keys: np.ndarray,
        values: np.ndarray,
        formats: tuple[Format, ...],
        rungs: set[int],
        grouped: Mapping[int, np.ndarray],
    ) -> None:
        self.values = values
        self.rounded: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for rung in sorted(rungs):
            each = formats[min(rung, len(formats)) - 1]
            if each.scale_tokens > 1:
                change = np.zeros(keys.shape, dtype=np.float32)
                known = grouped.get(rung, change[:0])
                change[: len(known)] = known
            else:
                change = each.rounded(keys, keys=True) - keys
            self.rounded[rung] = each.rounded(values, keys=False), change


def _token_error(
    rows: HeadRows, i: int, path: np.ndarray, tier: np.ndarray, vectors: _Vectors
) -> float:
    """Relative output error of token `i` of a run, mean over the captured layers."""
    row = rows.row(i)
    at = path[: row.shape[-1]]
    held = tier[:, at]
    if not ((held != Tier.HBM) & (held != Tier.DDR)).any():  # all of it there at full precision
        return 0.0
    layers, kv_heads = vectors.values.shape[1:3]
    # Tiers are [1 or layers, 1 or KV heads, 1, positions], masses [layers, KV heads, queries, ...]
    held = held.reshape(layers if len(held) > 1 else 1, -1, 1, len(at))
    mass = row.reshape(layers, kv_heads, -1, len(at))
    values = vectors.values[at].astype(np.float32).transpose(1, 2, 0, 3)
    exact = np.matmul(mass, values)
    for rung, (rounded_values, key_change) in vectors.rounded.items():
        small = _RUNG[held] == rung
        if not small.any():
            continue
        change = key_change[at].transpose(1, 2, 3, 0)
        queries = rows.query(i).reshape(layers, kv_heads, -1, change.shape[2])
        mass = mass * np.exp(np.where(small, np.matmul(queries, change), 0))
        rounded = rounded_values[at].transpose(1, 2, 0, 3)
        values = np.where(small[:, :, 0, :, None], rounded, values)
    mass = np.where(held == Tier.EVICTED, 0, mass)
    total = mass.sum(axis=-1, keepdims=True)
    mass = np.divide(mass, total, out=np.zeros_like(mass), where=total > 0)
    missing = exact - np.matmul(mass, values)
    norm = np.sqrt((exact**2).sum(axis=(1, 2, 3)))
    known = norm > 0  # not so for a layer whose softmax is NaN
    off = np.sqrt((missing[known] ** 2).sum(axis=(1, 2, 3)))
    return float((off / norm[known]).mean()) if known.any() else 0.0


@dataclass(frozen=True)
class Quality:
    """Which quality figures to take while a search is played."""

    #: Rows that `AttentionKept` may be measured on; empty if it is not to be
    attention: frozenset[Signal] = frozenset()
    output_error: bool = False  # `OutputError`

    @classmethod
    def of(cls, reader: TraceReader, output_error: bool = True) -> Quality:
        """Everything that a trace holds the observations for, and `output_error` if wanted."""
        info = reader.info
        rows = {signal for signals in _ROWS.values() for signal in signals if reader.has(signal)}
        if info.attention_layer_ids != info.qkv_layers:  # groups are the layers of vectors
            rows -= {Signal.LAYER_ATTENTION}
        return cls(frozenset(rows), output_error and all(reader.has(each) for each in VECTORS))

    def rows(self, grouping: str) -> Signal | None:
        """The rows that attention kept is measured on for policies of this grouping, if any."""
        return next((signal for signal in _ROWS[grouping] if signal in self.attention), None)

    def kept_note(self, grouping: str) -> str:
        """``"not known per head"`` where the trace tells it for policies of other groupings only.

        Else empty.
        """
        unknown = grouping != "shared" and self.attention and self.rows(grouping) is None
        return f"not known per {grouping}" if unknown else ""

    def reads(self, groupings: Iterable[str]) -> frozenset[Signal]:
        """Signals to read from the trace for them, for policies of these groupings."""
        rows = {rows for grouping in groupings if (rows := self.rows(grouping)) is not None}
        return frozenset(rows | (set(VECTORS) if self.output_error else set()))


#: No quality figures.
UNMEASURED = Quality()
