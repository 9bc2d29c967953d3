"""A walked search as a film over its steps: what it opened and gave up, and where its KV lived."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from arborsim.bank.walk import Step, Walk
from arborsim.core.events import Answer, Boundary, Event, Prefill
from arborsim.core.tiers import NUM_TIERS
from arborsim.run.controller import Controller
from arborsim.run.pictures import Frame, tokens_by_tier

#: Moments of a film; a search of more steps is shown at this many of them.
MOST_MOMENTS = 60
NEVER = -1


@dataclass(frozen=True)
class Moment:
    """The steps of a search between two batches of decode iterations, and what they led to.

    A search that is asked again before anything runs takes several steps in one moment.
    """

    #: Its steps.
    first: int
    last: int
    until: int  #: decode iterations done at its end
    #: Nodes opened, given up, and completed at the end, in the walk's numbers.
    opened: tuple[int, ...]
    dropped: tuple[int, ...]
    closed: tuple[int, ...]
    #: Thoughts to choose among; children that were asked for and not recorded.
    candidates: int
    misses: int
    active: tuple[int, ...]  #: leaves that decoded last

    @property
    def label(self) -> str:
        """In words."""
        steps = f"step {self.first + 1}" + (f" to {self.last + 1}" * (self.last > self.first))
        said = [f"{self.candidates:,} to choose among"] if self.candidates else []
        said += [f"{len(self.dropped):,} given up"] if self.dropped else []
        said += [f"{len(self.opened):,} opened"] if self.opened else []
        said += [f"{self.misses:,} more not recorded"] if self.misses else []
        return f"{steps}: {', '.join(said) or ('goes on' if self.active else 'the end')}"


def moments_of(walk: Walk) -> list[Moment]:
    """The moments of a walk, in order; there is at least one."""
    groups: list[list[int]] = []
    for number, step in enumerate(walk.steps):
        if groups and walk.steps[groups[-1][0]].iteration == step.iteration:
            groups[-1].append(number)
        else:
            groups.append([number])
    ends = [walk.steps[group[0]].iteration for group in groups[1:]] + [walk.iterations]
    return [
        _moment(walk.steps[group[0] : group[-1] + 1], group, until)
        for group, until in zip(groups, ends, strict=True)
    ]


def _moment(steps: tuple[Step, ...], numbers: list[int], until: int) -> Moment:
    runs = [run for step in steps for run in step.runs]
    return Moment(
        numbers[0],
        numbers[-1],
        until,
        opened=tuple(node for step in steps for node in step.opened),
        dropped=tuple(node for step in steps for node in step.dropped),
        closed=tuple(node for run in runs for node in run.ended),
        candidates=sum(len(step.candidates) for step in steps),
        misses=sum(step.misses for step in steps),
        active=runs[-1].leaves if runs else (),
    )


@dataclass
class SearchFilm:
    """Watches a simulated search (`arborsim.bank.job.simulate`) and takes its moments.

    Parameters
    ----------
    walk : Walk
        The search.
    most : int
        Moments that are taken: evenly spread, first and last included.
    """

    walk: Walk
    most: int = MOST_MOMENTS
    #: As many as moments were picked, once the search is over; nodes have the walk's numbers.
    frames: list[Frame] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._moments = moments_of(self.walk)
        last, count = len(self._moments) - 1, min(self.most, len(self._moments))
        self.picked = np.unique(np.linspace(0, last, count).round().astype(int))
        self._due = 0

    def watch(self, events: Iterable[Event], controller: Controller) -> Iterator[Event]:
        """Pass `events` on, and take what is over before each: a moment ends when the next step
        begins."""
        for event in events:
            self._take(event, controller)
            yield event

    def _take(self, event: Event, controller: Controller) -> None:
        if isinstance(event, Boundary | Prefill):
            return
        over = isinstance(event, Answer)
        while self._due < len(self._moments) and (
            over or self._moments[self._due].until <= controller.iterations
        ):
            if self._due in self.picked:
                self.frames.append(self._frame(self._moments[self._due], controller))
            self._due += 1

    def _frame(self, moment: Moment, controller: Controller) -> Frame:
        table = np.zeros((len(self.walk.bank_node), NUM_TIERS), dtype=np.int64)
        now = tokens_by_tier(controller)
        table[: len(now)] = now
        return Frame(controller.executor.clock(), moment.label, moment.active, table)

    def times(self) -> dict[str, list[int]]:
        """For each node the frame in which it was ``opened``, ``closed`` and ``dropped``.

        `NEVER` where it was not.  Between two frames that were picked, the later one counts.
        """
        found = {key: [NEVER] * len(self.walk.bank_node) for key in ("opened", "closed", "dropped")}
        found["opened"][0] = found["closed"][0] = 0
        for number, moment in enumerate(self._moments):
            shown = int(np.searchsorted(self.picked, number))
            for key, nodes in found.items():
                for node in getattr(moment, key):
                    nodes[node] = shown
        return found
