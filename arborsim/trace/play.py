"""Turn the rows of a recorded search into the events that a live run would raise."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from arborsim.core.events import (
    Answer,
    Boundary,
    Decode,
    Event,
    Prefill,
    Prune,
    TokenRun,
    Transition,
)
from arborsim.trace.episode import Episode
from arborsim.trace.schema import Kind


def play(episode: Episode) -> Iterator[Event]:
    """Yield the events of one search in time order.

    Parameters
    ----------
    episode : Episode
        Validated, with the observations that the policies need.

    Yields
    ------
    Event
        One `Prefill`; one `Transition` per batch of transition rows; a `Decode` for every longest
        run of iterations in which the same leaves, in the same order, decode one token each; and a
        `Boundary`, `Prune` or `Answer` per row of that kind.  A run ends at any other row.
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
            yield Prefill(_run(episode, first, first + stop - start, (0,)))
        elif kind == Kind.TOKEN:
            leaves = tuple(episode.node[start : start + width].tolist())
            yield Decode(_run(episode, first, first + stop - start, leaves))
        elif kind == Kind.TRANSITION:
            turned = tuple(episode.node[start:stop].tolist())
            parents = episode.parent[start:stop].tolist()
            pairs = zip(turned, parents, strict=True)
            yield Transition(turned, tuple((leaf, up) for leaf, up in pairs if leaf >= seen))
            seen = max(seen, max(turned) + 1)
        elif kind == Kind.BOUNDARY:
            yield Boundary(node, float(episode.reward[start]), float(episode.entropy[start]))
        elif kind == Kind.PRUNE:
            yield Prune(node)
        else:
            verdict = int(episode.correct[start])
            yield Answer(None if verdict < 0 else bool(verdict))


def _run(episode: Episode, start: int, stop: int, leaves: tuple[int, ...]) -> TokenRun:
    return TokenRun(
        leaves=leaves,
        steps=(stop - start) // len(leaves),
        token=episode.token[start:stop],
        observed=episode.observations(start, stop),
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
    together = np.isin(kind[batch_start], (Kind.PREFILL, Kind.TRANSITION))
    goes_on |= together & same_kind[batch_start]
    begins = ~goes_on
    return batch_start[begins], width[begins]
