"""Run searches side by side: each iteration of all of them is one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from arborsim.core.errors import BudgetInfeasible
from arborsim_torch.decoder import run_together
from arborsim_torch.live.policy_search import Ended, PolicySearch
from arborsim_torch.recording import EpisodeResult, Iterations


def drive(
    searches: Iterable[PolicySearch], width: int, done: Callable[[PolicySearch, Ended], None]
) -> None:
    """Run searches to their ends, up to `width` at a time, each iteration in one forward pass.

    Parameters
    ----------
    searches : iterable of PolicySearch
        Taken from when there is room.
    width : int
    done : callable
        Gets every search with its result, or with the `BudgetInfeasible` that ended it.
    """
    running: list[tuple[PolicySearch, Iterations[EpisodeResult], list[int]]] = []
    waiting = iter(searches)
    while True:
        while len(running) < width:
            search = next(waiting, None)
            if search is None:
                break
            steps = search.steps()
            ended = _advance(steps, None)
            if isinstance(ended, list):
                running.append((search, steps, ended))
            else:
                done(search, ended)
        if not running:
            return
        logits = run_together([search.prepare(tokens) for search, _, tokens in running])
        still = []
        for (search, steps, _), own in zip(running, logits, strict=True):
            ended = _advance(steps, own[:, 0])
            if isinstance(ended, list):
                still.append((search, steps, ended))
            else:
                done(search, ended)
        running = still


def _advance(
    steps: Iterations[EpisodeResult], logits: Tensor | None
) -> list[int] | EpisodeResult | BudgetInfeasible:
    """The tokens of the search's next iteration, or how it ended."""
    try:
        return next(steps) if logits is None else steps.send(logits)
    except StopIteration as end:
        result: EpisodeResult = end.value
        return result
    except BudgetInfeasible as error:
        return error
