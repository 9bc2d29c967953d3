"""Is this a search?  Checks that run on every episode read, vectorised over rows.

They catch files that were damaged, cut, or written by a recorder with a bug, before a policy or
the simulator draws conclusions from them.  Each check finds the first offending row and says what
is wrong with it in one line.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from arborsim.core.errors import TraceError
from arborsim.core.observations import AttentionRows, SparseRows
from arborsim.trace.episode import Episode
from arborsim.trace.schema import ENDS, KINDS, End, Kind

# float16 rounds each weight by up to 0.05 %, and flushes the smallest to zero.
_SUM_LOW, _SUM_HIGH = 0.9, 1.1
_HIGH_F16 = int(np.float16(_SUM_HIGH).view(np.uint16))

#: Float16 infinity as an unsigned integer: NaN and negative numbers are above it.
_INFINITE_F16 = int(np.float16(np.inf).view(np.uint16))

_ROUNDING = 1e-3  # of an entropy: sums over a vocabulary, in float32


@dataclass(frozen=True)
class _Labels:
    """Labels by codes, int ``[n]``, looked up for messages only."""

    labels: tuple[str, ...]
    codes: np.ndarray

    def __getitem__(self, i: int) -> str:
        return self.labels[int(self.codes[i])]


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
        self,
        wrong: np.ndarray,
        what: str,
        *values: np.ndarray | _Labels,
        rows: np.ndarray | None = None,
    ) -> None:
        """Raise for the first true entry of `wrong`, bool ``[n]``.

        Its entries of `values` are put into the message `what`.  `rows` are the rows of the
        entries, if they are not rows themselves.
        """
        if wrong.any():
            first = int(np.argmax(wrong))
            said = what.format(*(each[first] for each in values))
            raise self.error(said, first if rows is None else int(rows[first]))


def validate(episode: Episode, where: Where) -> None:
    """Raise `TraceError` unless the rows are a search.  Signals are checked as they are decoded.

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
    what = "node {} appears before node {}, although nodes are numbered in order of opening"
    where.check((node < 0) | (node > known + 1), what, node, known + 1)
    opens = node > known
    unopened = opens & (kind != Kind.TRANSITION) & (node > 0)
    what = "{} row of node {}, which no transition has opened"
    where.check(unopened, what, _Labels(KINDS, kind), node)
    first_row = np.flatnonzero(opens)
    parents, depths = parent[first_row], depth[first_row]
    numbers = np.arange(len(first_row))
    lost = np.where(numbers == 0, parents != -1, (parents < 0) | (parents >= numbers))
    what = "node {} names parent {}, which does not exist"
    where.check(lost, what, numbers, parents, rows=first_row)
    expected = np.where(numbers == 0, 0, depths[np.maximum(parents, 0)] + 1)
    what = "node {} has depth {}, expected {}"
    where.check(depths != expected, what, numbers, depths, expected, rows=first_row)
    parents, depths = parents[node], depths[node]
    what = "node {} names parent {}, but was opened under {}"
    where.check(parent != parents, what, node, parent, parents)
    what = "node {} has depth {}, but was opened at {}"
    where.check(depth != depths, what, node, depth, depths)
    return first_row


def _check_order(episode: Episode, where: Where) -> None:
    """The prefill comes first and the answer last, and time and iterations never run backwards."""
    kind, node, iteration, time = episode.kind, episode.node, episode.iteration, episode.time_s
    prefill, is_token = kind == Kind.PREFILL, kind == Kind.TOKEN
    late = prefill & (np.cumsum(~prefill) > 0)
    where.check(late, "prefill row after other rows")
    where.check(prefill & (node != 0), "prefill row of node {} instead of 0", node)
    early = (kind == Kind.ANSWER) & (np.arange(len(kind)) < len(kind) - 1)
    where.check(early, "rows follow the answer, which ends an episode")
    before = np.concatenate([[0], iteration[:-1]])
    where.check(iteration < before, "iteration {} after {}", iteration, before)
    where.check(prefill & (iteration != 0), "prefill row in iteration {}, not 0", iteration)
    where.check(is_token & (iteration < 1), "token row in iteration 0, which is the prefill")
    rows = np.flatnonzero(is_token)
    nodes, iterations = node[rows], iteration[rows]
    again = _repeats(iterations.astype(np.int64) * (int(node.max()) + 1) + nodes)
    where.check(again, "second token of node {} in iteration {}", nodes, iterations, rows=rows)
    where.check(~np.isfinite(time), "time_s is {}", time)
    earlier = np.concatenate([time[:1], time[:-1]])
    what = "time_s runs backwards, from {:.6g} to {:.6g}"
    where.check(time < earlier, what, earlier, time)


def _repeats(key: np.ndarray) -> np.ndarray:
    """Which entries equal an earlier one, bool of the same shape."""
    order = np.argsort(key, kind="stable")
    found = np.zeros(len(key), dtype=bool)
    found[order[1:]] = np.diff(key[order]) == 0
    return found


def _check_transitions(episode: Episode, where: Where, first_row: np.ndarray) -> None:
    """Tokens belong to leaves the search has turned to and not given up."""
    kind, node = episode.kind, episode.node
    transitions = kind == Kind.TRANSITION
    begins = transitions & ~np.concatenate([[False], transitions[:-1]])
    group = np.cumsum(begins)  # 0 before the first transition, when the prompt is the leaf
    count = len(first_row)
    key = group.astype(np.int64) * count + node
    leaves, rows = key[transitions], np.flatnonzero(transitions)
    what = "transition names node {} twice in one batch"
    where.check(_repeats(leaves), what, node[rows], rows=rows)
    active = np.isin(key, leaves) | ((group == 0) & (node == 0))
    what = "token row of node {}, which is no leaf of the last transition"
    where.check((kind == Kind.TOKEN) & ~active, what, node)
    pruned = kind == Kind.PRUNE
    pruned_at = np.full(count, len(kind))
    np.minimum.at(pruned_at, node[pruned], np.flatnonzero(pruned))
    at = pruned_at[node]
    after = ((kind == Kind.TOKEN) | transitions) & (np.arange(len(kind)) > at)
    what = "{} row of node {}, which was pruned in row {}"
    where.check(after, what, _Labels(KINDS, kind), node, at)


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
    found, rows = episode.position, episode.token_rows
    what = "token row of node {} has position {}, expected {}"
    where.check(found != expected, what, node, found, expected, rows=rows)


def _check_values(episode: Episode, where: Where) -> None:
    reward, entropy, token = episode.reward, episode.entropy, episode.token
    where.check((reward < 0) | (reward > 1), "reward is {:.6g}, not between 0 and 1", reward)
    where.check((entropy < 0) | np.isinf(entropy), "entropy is {:.6g} nats", entropy)
    vocab = episode.info.geometry.vocab
    most = math.log(vocab) * (1 + _ROUNDING)
    what = f"entropy is {{:.6g}} nats, above the ln({vocab}) of the vocabulary"
    where.check(entropy > most, what, entropy)
    unknown = ((token < 0) & episode.info.knows_token_ids) | (token >= vocab)
    what = f"token {{}} is not in the vocabulary of {vocab}"
    where.check(unknown, what, token, rows=episode.token_rows)


def _check_ends(episode: Episode, where: Where, first_row: np.ndarray) -> None:
    """Thoughts end where they are complete, only finished ones answer, and none goes on."""
    end, node = episode.end, episode.node
    if end is None:
        return
    where.check(end < 0, f"the end of a thought is none of {', '.join(ENDS)}")
    ended = end != End.NONE
    what = "{} row says that a thought is {}"
    kinds, ends = _Labels(KINDS, episode.kind), _Labels(ENDS, end - 1)
    where.check(ended & (episode.kind != Kind.BOUNDARY), what, kinds, ends)
    ended_at = np.full(len(first_row), len(end))
    np.minimum.at(ended_at, node[ended], np.flatnonzero(ended))
    opened, up = first_row[1:], episode.parent[first_row[1:]]
    at, child = ended_at[up], np.arange(1, len(first_row))
    what = "node {} is opened under node {}, which ended in row {}"
    where.check(at < opened, what, child, up, at, rows=opened)
    if episode.answer is not None:
        answers = np.fromiter((a is not None for a in episode.answer), bool, len(end))
        where.check(answers & (end != End.FINISHED), "an answer, but no finished thought")


def check_attention(
    attention: AttentionRows, position: np.ndarray, token_rows: np.ndarray, where: Where
) -> None:
    """A row per token has the right length and holds finite weights (see `check_sums`)."""
    if isinstance(attention, SparseRows):
        _check_sparse(attention, token_rows, where)
        values, offsets = attention.value, attention.offsets
    else:
        values, offsets = attention.values, attention.offsets
        lengths, expected = np.diff(offsets), position + 1
        what = "attention has {} values, expected {} (one per position on the path)"
        where.check(lengths != expected, what, lengths, expected, rows=token_rows)
    _check_weights(values, offsets, token_rows, where)


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
        rows = token_rows[row]
        what = "attention_index {} lies beyond the token's own position"
        where.check(beyond, what, index, rows=rows)
        where.check(falls, "attention_index {} is not above the one before it", index, rows=rows)
    rest = attention.rest
    what = "attention_rest is {:.6g}, not a probability"
    where.check(~((rest >= 0) & (rest <= _SUM_HIGH)), what, rest, rows=token_rows)


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


def check_sums(sums: np.ndarray, token_rows: np.ndarray, where: Where) -> None:
    """Every attention row, of which float64 ``[tokens]`` are the sums, adds up to about 1."""
    off = ~((sums >= _SUM_LOW) & (sums <= _SUM_HIGH))
    where.check(off, "attention sums to {:.4g} instead of 1", sums, rows=token_rows)


def check_finite(
    vectors: np.ndarray, name: str, rows: np.ndarray, where: Where, signed: bool = True
) -> None:
    """Vectors, float16 ``[tokens, ...]``, are finite, and not below 0 unless they are `signed`.

    `rows` are the rows of the tokens, int ``[tokens]``.
    """
    bits = vectors.view(np.uint16)
    if signed:
        bits = bits & np.uint16(0x7FFF)  # without the sign
    # One integer maximum sees NaN, infinity and a sign: see `_check_weights`.
    if bits.size == 0 or bits.max() < _INFINITE_F16:
        return
    wrong = ~np.isfinite(vectors)
    wrong |= (vectors < 0) & (not signed)
    of_token = wrong.reshape(len(vectors), -1).any(axis=1)
    if of_token.any():
        token = int(np.argmax(of_token))
        value = vectors[token][wrong[token]][0]
        what = "which is not finite" if not np.isfinite(value) else "which is below 0"
        raise where.error(f"{name} holds {value}, {what}", int(rows[token]))


def check_layer_rows(
    values: np.ndarray, bounds: np.ndarray, rows: np.ndarray, where: Where
) -> None:
    """Rows of single layers hold probabilities, or NaN throughout, and means sum to about 1.

    Lists are alternately the mean and the variance over a layer's heads: `values` float16 ``[sum of
    lengths]``, `bounds` int64 ``[lists + 1]``, and their `rows` int ``[lists]``.
    """
    if len(values) and values.view(np.uint16).max() > _HIGH_F16:
        owner = np.repeat(np.arange(len(rows)), np.diff(bounds))
        unknown = np.isnan(values)
        throughout = np.bincount(owner, unknown, len(rows)) == np.diff(bounds)
        wrong = (values < 0) | (values > np.float16(_SUM_HIGH)) | (unknown & ~throughout[owner])
        where.check(wrong, "attention_layers holds {}, not a probability", values, rows=rows[owner])
    sums = np.add.reduceat(values, bounds[:-1], dtype=np.float32)[::2]
    off = (sums < _SUM_LOW) | (sums > _SUM_HIGH)
    what = "a mean row of attention_layers sums to {:.4g} instead of 1"
    where.check(off, what, sums, rows=rows[::2])
