"""One recorded search, and the events that a live run of it would raise (`play`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from arborsim.core import events
from arborsim.core.observations import Observations
from arborsim.trace.schema import Kind, TraceInfo


@dataclass(frozen=True, kw_only=True)
class Episode(Observations):
    """One search: its event rows, and what was observed of its tokens, if it was asked for.

    Row arrays have shape ``[rows]``, token arrays ``[tokens]``.  A *token* is a prefill or token
    row, numbered in row order.  Missing integers are -1, missing floats NaN.
    """

    index: int  # episode number in the trace
    info: TraceInfo
    kind: np.ndarray  # int8 [rows]: values of `arborsim.trace.schema.Kind`
    #: int32 [rows]
    iteration: np.ndarray
    node: np.ndarray
    parent: np.ndarray
    depth: np.ndarray
    time_s: np.ndarray  # float64 [rows]
    #: float32 [rows]
    entropy: np.ndarray
    reward: np.ndarray
    #: int8 [rows]: 1, 0, or -1 for "not judged".  Of the last row: the search's answer; of boundary
    #: rows: the thought's own.
    correct: np.ndarray
    #: int8 [rows]: values of `arborsim.trace.schema.End`; None if the trace does not distinguish
    #: thoughts that ended
    end: np.ndarray | None = None
    token_rows: np.ndarray  # int64 [tokens]: row of each token
    #: int32 [tokens]
    token: np.ndarray
    position: np.ndarray
    #: Texts, and what finished thoughts answer; one per row
    text: tuple[str | None, ...] | None = None
    answer: tuple[str | None, ...] | None = None
    #: int64 [k], float16 [k, size]: the rows (boundaries) that have an embedding, and those
    embedding_rows: np.ndarray | None = None
    embedding: np.ndarray | None = None

    @property
    def num_rows(self) -> int:
        return len(self.kind)


def play(episode: Episode) -> Iterator[events.Event]:
    """The events of one search in time order.

    One `Prefill`, one `Transition` per batch of transition rows, and a `Boundary`, `Prune` or
    `Answer` per row of that kind.  A `Decode` is a longest run of iterations in which the same
    leaves, in the same order, decode one token each.  It ends at any other row.
    """
    starts, widths = _segments(episode)
    stops = np.append(starts[1:], episode.num_rows).tolist()
    # Token number of each row that has one: runs are slices of the token arrays.
    token_of_row = np.searchsorted(episode.token_rows, starts).tolist()
    seen = 0  # nodes are numbered in order of opening, so this is the next new one
    for start, stop, width, first in zip(
        starts.tolist(), stops, widths.tolist(), token_of_row, strict=True
    ):
        kind, node = int(episode.kind[start]), int(episode.node[start])
        if kind == Kind.PREFILL:
            seen = 1
            yield events.Prefill(_run(episode, first, first + stop - start, (0,)))
        elif kind == Kind.TOKEN:
            leaves = tuple(episode.node[start : start + width].tolist())
            yield events.Decode(_run(episode, first, first + stop - start, leaves))
        elif kind == Kind.TRANSITION:
            leaves = tuple(episode.node[start:stop].tolist())
            parents = episode.parent[start:stop].tolist()
            pairs = zip(leaves, parents, strict=True)
            yield events.Transition(leaves, tuple((leaf, up) for leaf, up in pairs if leaf >= seen))
            seen = max(seen, max(leaves) + 1)
        elif kind == Kind.BOUNDARY:
            yield events.Boundary(node, float(episode.reward[start]), float(episode.entropy[start]))
        elif kind == Kind.PRUNE:
            yield events.Prune(node)
        else:
            verdict = int(episode.correct[start])
            yield events.Answer(None if verdict < 0 else bool(verdict))


def _run(episode: Episode, start: int, stop: int, leaves: tuple[int, ...]) -> events.TokenRun:
    return events.TokenRun(
        leaves=leaves,
        steps=(stop - start) // len(leaves),
        token=episode.token[start:stop],
        observed=episode.slice(start, stop),
    )


def _segments(episode: Episode) -> tuple[np.ndarray, np.ndarray]:
    """First row of each event, and for decode runs the number of leaves (else 1).

    Rows of one iteration are one batch.  A batch goes on with the run of the batch before it if
    that one lies directly before it and has the same nodes in the same order.
    """
    kind, node, iteration = episode.kind, episode.node, episode.iteration
    rows = np.arange(episode.num_rows)
    same_kind = np.concatenate([[False], kind[1:] == kind[:-1]])
    same_iteration = np.concatenate([[False], iteration[1:] == iteration[:-1]])
    is_token = kind == Kind.TOKEN

    # Batches: for rows other than tokens, a batch of one.
    batch_start = np.flatnonzero(~(is_token & same_kind & same_iteration))
    width = np.diff(batch_start, append=episode.num_rows)
    batch_of_row = np.repeat(np.arange(len(batch_start)), width)
    width_before = np.concatenate([[0], width[:-1]])
    alike = width == width_before
    # With equal widths, the row's counterpart in the batch before lies `width` rows up.
    counterpart = np.maximum(rows - width[batch_of_row], 0)
    alike &= np.logical_and.reduceat(node == node[counterpart], batch_start)

    goes_on = is_token[batch_start] & same_kind[batch_start] & alike
    one_event = np.isin(kind[batch_start], (Kind.PREFILL, Kind.TRANSITION))
    goes_on |= one_event & same_kind[batch_start]
    begins = ~goes_on
    return batch_start[begins], width[begins]
