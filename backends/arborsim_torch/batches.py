"""Run several searches of one model together: each iteration of all of them in one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from torch import Tensor

from arborsim.core.errors import BudgetInfeasible
from arborsim_torch.decoder import Pass, run_together
from arborsim_torch.recording import EpisodeResult, Iterations


class Batched(Protocol):
    """A search that leaves its forward passes to `run_batched`."""

    def steps(self) -> Iterations[EpisodeResult]:
        """See `arborsim_torch.recorder.EpisodeRecorder.steps`."""
        ...

    def prepare(self, tokens: list[int]) -> Pass:
        """The next iteration's pass."""
        ...


Ended = EpisodeResult | BudgetInfeasible
_Search = TypeVar("_Search", bound=Batched)


def run_batched(
    searches: Iterable[_Search], width: int, done: Callable[[_Search, Ended], None]
) -> None:
    """Run searches to their ends, up to `width` at a time, each iteration in one forward pass.

    Searches are taken from when there is room.  `done` gets every search with its result, or with
    the `BudgetInfeasible` that ended it.
    """
    running: list[tuple[_Search, Iterations[EpisodeResult], list[int]]] = []
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


def _advance(steps: Iterations[EpisodeResult], logits: Tensor | None) -> list[int] | Ended:
    """The tokens of the search's next iteration, or how it ended."""
    try:
        return next(steps) if logits is None else steps.send(logits)
    except StopIteration as end:
        result: EpisodeResult = end.value
        return result
    except BudgetInfeasible as error:
        return error
