"""Is this a search?  Checks that run on every episode read; vectorised over rows.

They catch files that were damaged, cut, or written by a recorder with a bug, before a policy or
the simulator draws conclusions from them.  Each check finds the first offending row and says what
is wrong with it in one line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from arborsim.core.errors import TraceError
from arborsim.core.observations import AttentionRows, SparseRows
from arborsim.trace.schema import ENDS, KINDS, End, Kind

if TYPE_CHECKING:
    from arborsim.trace.episode import Episode

# float16 rounds each weight by up to 0.05 %, and flushes the smallest to zero.
_SUM_LOW, _SUM_HIGH = 0.9, 1.1
_HIGH_F16 = int(np.float16(_SUM_HIGH).view(np.uint16))

#: All row sums are checked up to this many values; beyond, those of evenly spaced rows.
SUM_CHECK_VALUES = 1 << 17


@dataclass(frozen=True)
class Where:
    """The place that error messages name."""

    file: str
    episode: int

    def error(self, what: str, row: int | None = None) -> TraceError:
        at = f"episode {self.episode}" + ("" if row is None else f", row {row}")
        return TraceError(
            f"{self.file}: {at}: {what}; the file is damaged or was written by a broken recorder"
        )

    def check(
        self, wrong: np.ndarray, what: Callable[[int], str], rows: np.ndarray | None = None
    ) -> None:
        """Raise for the first true entry of `wrong`, bool ``[n]``; `what` makes the message of it.

        `rows` are the rows of the entries, if they are not rows themselves.
        """
        if wrong.any():
            first = int(np.argmax(wrong))
            raise self.error(what(first), first if rows is None else int(rows[first]))


def validate(episode: Episode, where: Where) -> None:
    """Raise `TraceError` unless the rows are a search; signals are checked as they are decoded.

    The arrays of `episode` have consistent shapes (`decode_episode` sees to that).
    """
    first_row = _check_nodes(episode, where)
    _check_order(episode, where)
    _check_transitions(episode, where, first_row)
    _check_positions(episode, where)
    _check_values(episode, where)
    _check_ends(episode, where, first_row)


def _check_nodes(episode: Episode, where: Where) -> np.ndarray:
    """Nodes are numbered in order of opening, and always name the same parent and depth."""
    node, parent, depth, kind = episode.node, episode.parent, episode.depth, episode.kind
    if kind[0] != Kind.PREFILL or node[0] != 0:
        raise where.error(
            f"starts with a {KINDS[kind[0]]} row of node {node[0]} instead of a prefill of node 0",
            0,
        )
    # A node is known once it is not above the highest number so far; the next one is one higher.
    highest = np.maximum.accumulate(node)
    known = np.concatenate([[-1], highest[:-1]])
    where.check(
        (node < 0) | (node > known + 1),
        lambda r: (
            f"node {node[r]} appears before node {known[r] + 1}, although nodes are "
            "numbered in order of opening"
        ),
    )
    opens = node > known
    where.check(
        opens & (kind != Kind.TRANSITION) & (node > 0),
        lambda r: f"{KINDS[kind[r]]} row of node {node[r]}, which no transition has opened",
    )
    first_row = np.flatnonzero(opens)
    parents, depths = parent[first_row], depth[first_row]
    numbers = np.arange(len(first_row))
    where.check(
        np.where(numbers == 0, parents != -1, (parents < 0) | (parents >= numbers)),
        lambda n: f"node {n} names parent {parents[n]}, which does not exist",
        first_row,
    )
    expected = np.where(numbers == 0, 0, depths[np.maximum(parents, 0)] + 1)
    where.check(
        depths != expected,
        lambda n: f"node {n} has depth {depths[n]}, expected {expected[n]}",
        first_row,
    )
    where.check(
        parent != parents[node],
        lambda r: (
            f"node {node[r]} names parent {parent[r]}, but was opened under {parents[node[r]]}"
        ),
    )
    where.check(
        depth != depths[node],
        lambda r: f"node {node[r]} has depth {depth[r]}, but was opened at {depths[node[r]]}",
    )
    return first_row


def _check_order(episode: Episode, where: Where) -> None:
    """The prefill comes first and the answer last; time and iterations never run backwards."""
    kind, node, iteration, time = episode.kind, episode.node, episode.iteration, episode.time_s
    prefill, is_token = kind == Kind.PREFILL, kind == Kind.TOKEN
    late = prefill & (np.cumsum(~prefill) > 0)
    where.check(late, lambda r: "prefill row after other rows")
    where.check(prefill & (node != 0), lambda r: f"prefill row of node {node[r]} instead of 0")
    early = (kind == Kind.ANSWER) & (np.arange(len(kind)) < len(kind) - 1)
    where.check(early, lambda r: "rows follow the answer, which ends an episode")
    where.check(
        np.concatenate([iteration[:1] < 0, iteration[1:] < iteration[:-1]]),
        lambda r: f"iteration {iteration[r]} after {iteration[r - 1] if r else 0}",
    )
    where.check(
        prefill & (iteration != 0), lambda r: f"prefill row in iteration {iteration[r]}, not 0"
    )
    where.check(
        is_token & (iteration < 1), lambda r: "token row in iteration 0, which is the prefill"
    )
    rows = np.flatnonzero(is_token)
    where.check(
        _repeats(iteration[rows].astype(np.int64) * (int(node.max()) + 1) + node[rows]),
        lambda t: f"second token of node {node[rows[t]]} in iteration {iteration[rows[t]]}",
        rows,
    )
    where.check(~np.isfinite(time), lambda r: f"time_s is {time[r]}")
    where.check(
        np.diff(time, prepend=time[0]) < 0,
        lambda r: f"time_s runs backwards, from {time[r - 1]:.6g} to {time[r]:.6g}",
    )


def _repeats(key: np.ndarray) -> np.ndarray:
    """Which entries equal an earlier one; bool, same shape."""
    order = np.argsort(key, kind="stable")
    found = np.zeros(len(key), dtype=bool)
    found[order[1:]] = np.diff(key[order]) == 0
    return found


def _check_transitions(episode: Episode, where: Where, first_row: np.ndarray) -> None:
    """Tokens belong to leaves the search has turned to and not given up."""
    kind, node = episode.kind, episode.node
    turns = kind == Kind.TRANSITION
    begins = turns & ~np.concatenate([[False], turns[:-1]])
    group = np.cumsum(begins)  # 0 before the first transition, when the prompt is the leaf
    count = len(first_row)
    key = group.astype(np.int64) * count + node
    leaves, turn_rows = key[turns], np.flatnonzero(turns)
    where.check(
        _repeats(leaves),
        lambda t: f"transition names node {node[turn_rows[t]]} twice in one batch",
        turn_rows,
    )
    active = np.isin(key, leaves) | ((group == 0) & (node == 0))
    where.check(
        (kind == Kind.TOKEN) & ~active,
        lambda r: f"token row of node {node[r]}, which is no leaf of the last transition",
    )
    pruned = kind == Kind.PRUNE
    pruned_at = np.full(count, len(kind))
    np.minimum.at(pruned_at, node[pruned], np.flatnonzero(pruned))
    where.check(
        ((kind == Kind.TOKEN) | turns) & (np.arange(len(kind)) > pruned_at[node]),
        lambda r: (
            f"{KINDS[kind[r]]} row of node {node[r]}, which was pruned in row {pruned_at[node[r]]}"
        ),
    )


def _check_positions(episode: Episode, where: Where) -> None:
    """Each token's position is the number of tokens before it on its path."""
    node = episode.node[episode.token_rows]
    count = int(episode.node.max()) + 1
    lengths = np.bincount(node, minlength=count)
    order, number = np.argsort(node, kind="stable"), np.arange(len(node))
    starts = np.cumsum(lengths) - lengths
    rank = np.empty(len(node), dtype=np.int64)
    rank[order] = number - starts[node[order]]

    last_token, first_token = np.full(count, -1), np.full(count, len(node))
    last_token[node] = number  # of a node's tokens, the last one is assigned
    first_token[node[::-1]] = number[::-1]
    parent = np.full(count, -1)
    parent[episode.node] = episode.parent

    # Parents have smaller numbers than children, so one pass over the nodes is enough.
    path_last, parents, sizes = last_token.tolist(), parent.tolist(), lengths.tolist()
    before, ancestor_last = [0] * count, [-1] * count
    for n in range(1, count):
        up = parents[n]
        before[n] = before[up] + sizes[up]
        ancestor_last[n] = path_last[up]
        path_last[n] = max(path_last[n], path_last[up])
    expected = np.asarray(before)[node] + rank
    late = np.asarray(ancestor_last) > first_token
    if late.any():
        child = int(np.argmax(late))
        token = ancestor_last[child]
        raise where.error(
            f"token row of node {node[token]}, although node {child} below it has tokens already",
            int(episode.token_rows[token]),
        )
    where.check(
        episode.position != expected,
        lambda t: (
            f"token row of node {node[t]} has position {episode.position[t]}, "
            f"expected {expected[t]}"
        ),
        episode.token_rows,
    )


def _check_values(episode: Episode, where: Where) -> None:
    reward, entropy, token = episode.reward, episode.entropy, episode.token
    where.check(
        (reward < 0) | (reward > 1), lambda r: f"reward is {reward[r]:.6g}, not between 0 and 1"
    )
    where.check((entropy < 0) | np.isinf(entropy), lambda r: f"entropy is {entropy[r]:.6g} nats")
    vocab = episode.info.geometry.vocab
    where.check(
        ((token < 0) & episode.info.knows_token_ids) | (token >= vocab),
        lambda t: f"token {token[t]} is not in the vocabulary of {vocab}",
        episode.token_rows,
    )


def _check_ends(episode: Episode, where: Where, first_row: np.ndarray) -> None:
    """Thoughts end where they are complete, only finished ones answer, and none goes on."""
    end, node = episode.end, episode.node
    if end is None:
        return
    where.check(end < 0, lambda r: f"the end of a thought is none of {', '.join(ENDS)}")
    ended = end != End.NONE
    where.check(
        ended & (episode.kind != Kind.BOUNDARY),
        lambda r: f"{KINDS[episode.kind[r]]} row says that a thought is {ENDS[end[r] - 1]}",
    )
    ended_at = np.full(len(first_row), len(end))
    np.minimum.at(ended_at, node[ended], np.flatnonzero(ended))
    opened, up = first_row[1:], episode.parent[first_row[1:]]
    where.check(
        ended_at[up] < opened,
        lambda n: (
            f"node {n + 1} is opened under node {up[n]}, which ended in row {ended_at[up[n]]}"
        ),
        opened,
    )
    if episode.answer is not None:
        answers = np.fromiter((a is not None for a in episode.answer), bool, len(end))
        where.check(answers & (end != End.FINISHED), lambda r: "an answer, but no finished thought")


def check_attention(
    attention: AttentionRows, position: np.ndarray, token_rows: np.ndarray, where: Where
) -> None:
    """A row per token has the right length, holds finite weights, and sums to about 1."""
    if isinstance(attention, SparseRows):
        _check_sparse(attention, token_rows, where)
        values, offsets, rest = attention.value, attention.offsets, attention.rest
    else:
        values, offsets, rest = attention.values, attention.offsets, None
        lengths = np.diff(offsets)
        where.check(
            lengths != position + 1,
            lambda t: (
                f"attention has {lengths[t]} values, expected {position[t] + 1} "
                "(one per position on the path)"
            ),
            token_rows,
        )
    _check_weights(values, offsets, token_rows, where)
    _check_sums(values, offsets, rest, token_rows, where)


def _check_sparse(attention: SparseRows, token_rows: np.ndarray, where: Where) -> None:
    index, offsets, lengths = attention.index, attention.offsets, attention.lengths
    falls = np.empty(len(index), dtype=bool)
    falls[:1] = False
    np.less_equal(index[1:], index[:-1], out=falls[1:])
    held = np.flatnonzero(np.diff(offsets))
    falls[offsets[held]] = False  # the first of a row may be below the last of the row before
    first, last = index[offsets[held]], index[offsets[held + 1] - 1]
    if falls.any() or (first < 0).any() or (last >= lengths[held]).any():
        row = np.repeat(np.arange(len(lengths)), np.diff(offsets))
        beyond = (index < 0) | (index >= lengths[row])
        where.check(
            beyond,
            lambda i: f"attention_index {index[i]} lies beyond the token's own position",
            token_rows[row],
        )
        where.check(
            falls,
            lambda i: f"attention_index {index[i]} is not above the one before it",
            token_rows[row],
        )
    rest = attention.rest
    where.check(
        ~((rest >= 0) & (rest <= _SUM_HIGH)),
        lambda t: f"attention_rest is {rest[t]:.6g}, not a probability",
        token_rows,
    )


def _check_weights(
    values: np.ndarray, offsets: np.ndarray, token_rows: np.ndarray, where: Where
) -> None:
    # As an unsigned integer, a float16 above this one is greater, infinite, NaN or negative: one
    # integer maximum over the array, at the speed of memory, sees all of it.
    if len(values) == 0 or values.view(np.uint16).max() <= _HIGH_F16:
        return
    wrong = ~((values >= 0) & (values <= np.float16(_SUM_HIGH)))
    if wrong.any():
        first = int(np.argmax(wrong))
        token = int(np.searchsorted(offsets, first, side="right")) - 1
        raise where.error(
            f"attention is {values[first]} at entry {first - int(offsets[token])}, "
            "not a probability",
            int(token_rows[token]),
        )


def _check_sums(
    values: np.ndarray,
    offsets: np.ndarray,
    rest: np.ndarray | None,
    token_rows: np.ndarray,
    where: Where,
) -> None:
    step = max(1, -(-len(values) // SUM_CHECK_VALUES))
    tested = np.arange(0, len(offsets) - 1, step)
    if step == 1:
        running = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
        sums = running[offsets[1:]] - running[offsets[:-1]]
    else:
        bounds = zip(offsets[tested].tolist(), offsets[tested + 1].tolist(), strict=True)
        sums = np.array([values[a:b].sum(dtype=np.float32) for a, b in bounds], dtype=np.float64)
    if rest is not None:
        sums = sums + rest[tested]
    where.check(
        ~((sums >= _SUM_LOW) & (sums <= _SUM_HIGH)),
        lambda t: f"attention sums to {sums[t]:.4g} instead of 1",
        token_rows[tested],
    )


def check_layer_rows(
    values: np.ndarray, bounds: np.ndarray, rows: np.ndarray, where: Where
) -> None:
    """Rows of single layers hold probabilities, and means sum to about 1; NaN may be anywhere.

    Lists are by turns the mean and the variance over a layer's heads: `values` float16 ``[sum of
    lengths]``, `bounds` int64 ``[lists + 1]``, and their `rows` int ``[lists]``.
    """
    wrong = (values < 0) | (values > np.float16(_SUM_HIGH))  # false for NaN
    if wrong.any():
        first = int(np.argmax(wrong))
        row = rows[np.searchsorted(bounds, first, side="right") - 1]
        raise where.error(f"attention_layers holds {values[first]}, not a probability", int(row))
    sums = np.add.reduceat(values, bounds[:-1], dtype=np.float32)[::2]
    where.check(
        (sums < _SUM_LOW) | (sums > _SUM_HIGH),
        lambda i: f"a mean row of attention_layers sums to {sums[i]:.4g} instead of 1",
        rows[::2],
    )
