"""Trees of a few problems for the page of a search: recorded thoughts, and searches as films.

A problem's thoughts are laid out once; each search has its own film on that layout: over its steps,
what it opened and gave up, and where its KV lived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, product
from typing import Any

import numpy as np

from arborsim.core.errors import BudgetInfeasible, UsageError
from arborsim.core.events import Answer, Boundary, Event, Prefill
from arborsim.core.tiers import NUM_TIERS
from arborsim.core.workers import in_order
from arborsim.play.controller import Controller
from arborsim.play.episode import Cell
from arborsim.play.pictures import Frame, NodeRecord, tokens_by_tier
from arborsim.products.replay import trees
from arborsim.products.search.results import SearchResult
from arborsim.products.search.run import SearchJob, simulate
from arborsim.searches.arms import Arm
from arborsim.searches.bank import Bank, read_bank
from arborsim.searches.visited import visited
from arborsim.searches.walk import Step, Walk, walk
from arborsim.trace.reader import open_trace
from arborsim.trace.schema import End, Kind

#: Thoughts of one problem that are drawn, and characters of each that are shown.
MOST_NODES = 2_000
MOST_TEXT = 600
#: Moments of a film; a search of more steps is shown at this many of them.
MOST_MOMENTS = 60
NEVER = -1
#: Numbers that the films of a page may take together: about 4 bytes each.
_ALL_NUMBERS = 1_500_000

Advance = Callable[[str, int], None]


@dataclass(frozen=True)
class Moment:
    """The steps of a search between two batches of decode iterations, and what they led to.

    A search that is asked again before anything runs takes several steps in one moment.  Nodes have
    the walk's numbers.
    """

    label: str  #: in words
    until: int  #: decode iterations done at its end
    opened: tuple[int, ...]
    dropped: tuple[int, ...]  #: given up
    closed: tuple[int, ...]  #: completed at the end
    active: tuple[int, ...]  #: leaves that decoded last


def moments_of(walk: Walk) -> list[Moment]:
    """The moments of a walk, in order; there is at least one."""
    steps = groupby(enumerate(walk.steps, 1), key=lambda each: each[1].iteration)
    groups = [list(group) for _, group in steps]
    ends = [group[0][1].iteration for group in groups[1:]] + [walk.iterations]
    return [_moment(group, until) for group, until in zip(groups, ends, strict=True)]


def _moment(numbered: Sequence[tuple[int, Step]], until: int) -> Moment:
    steps, first, last = [step for _, step in numbered], numbered[0][0], numbered[-1][0]
    opened = tuple(node for step in steps for node in step.opened)
    dropped = tuple(node for step in steps for node in step.dropped)
    runs = [run for step in steps for run in step.runs]
    active = runs[-1].leaves if runs else ()
    counts = {
        "to choose among": sum(len(step.candidates) for step in steps),
        "given up": len(dropped),
        "opened": len(opened),
        "more not recorded": sum(step.misses for step in steps),
    }
    known = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    name = f"step {first} to {last}" if last > first else f"step {first}"
    label = f"{name}: {known or ('goes on' if active else 'the end')}"
    closed = tuple(node for run in runs for node in run.ended)
    return Moment(label, until, opened, dropped, closed, active)


class SearchFilm:
    """Watches a simulated search (`arborsim.products.search.run.simulate`) and takes its moments.

    At most `most` are picked: evenly spread, first and last included.  There is a frame for each of
    them once the search is over; nodes have the walk's numbers.
    """

    def __init__(self, walk: Walk, most: int = MOST_MOMENTS) -> None:
        self.frames: list[Frame] = []
        self._moments, self._due, self._nodes = moments_of(walk), 0, walk.model_calls + 1
        last, count = len(self._moments) - 1, min(most, len(self._moments))
        self.picked = np.unique(np.linspace(0, last, count).round().astype(int))

    def watch(self, events: Iterable[Event], controller: Controller) -> Iterator[Event]:
        """Pass `events` on, and take what is over before each: a moment ends when the next step
        begins."""
        for event in events:
            if not isinstance(event, Boundary | Prefill):
                self._take(controller, over=isinstance(event, Answer))
            yield event

    def _take(self, controller: Controller, over: bool) -> None:
        for number, moment in enumerate(self._moments[self._due :], self._due):
            if not over and moment.until > controller.iterations:
                break
            if number in self.picked:
                table = np.zeros((self._nodes, NUM_TIERS), dtype=np.int64)
                now = tokens_by_tier(controller)
                table[: len(now)] = now
                time_s = controller.executor.clock()
                self.frames.append(Frame(time_s, moment.label, moment.active, table))
            self._due = number + 1

    def times(self) -> dict[str, list[int]]:
        """For each node the frame in which it was ``opened``, ``closed`` and ``dropped``.

        `NEVER` where it was not.  Between two frames that were picked, the later one counts.
        """
        found = {key: [NEVER] * self._nodes for key in ("opened", "closed", "dropped")}
        found["opened"][0] = found["closed"][0] = 0
        for number, moment in enumerate(self._moments):
            shown = int(np.searchsorted(self.picked, number))
            for key, nodes in found.items():
                for node in getattr(moment, key):
                    nodes[node] = shown
        return found


@dataclass(frozen=True)
class ProblemTrees:
    """Plain data for the page."""

    title: str
    layout: dict[str, Any]  #: places and facts of the problem's drawn thoughts
    films: list[dict[str, Any]]  #: one per search, policy and budget
    recorded: int  #: thoughts of the problem
    cut: int = 0  #: films that found no room on the page
    infeasible: int = 0  #: searches for which the budget is too small

    @property
    def name(self) -> str:
        return self.title.partition(":")[0]

    def notes(self) -> Iterator[str]:
        """Notes on what is not on the page."""
        drawn = len(self.layout["parent"])
        if drawn < self.recorded:
            yield (
                f"{self.name}: of {self.recorded:,} recorded thoughts {drawn:,} are drawn, those "
                "first that most searches opened."
            )
        if self.cut:
            yield (
                f"{self.name}: {self.cut} searches are not shown, so that the page stays small; to "
                "see them, ask for fewer searches or policies."
            )
        if self.infeasible:
            yield f"{self.name}: budgets are too small for {self.infeasible} searches."


def chosen_problems(results: Sequence[SearchResult], asked: Sequence[int]) -> dict[int, str]:
    """Which problems are drawn, with a title each.

    Those that were asked for, or else the first that all searches solve, the first that some do
    and the first that none does; the first one where nothing is judged.

    Raises
    ------
    UsageError
        A problem that was asked for was not searched.
    """
    verdicts: dict[int, dict[tuple[str, int], bool | None]] = {}
    for r in results:
        verdicts.setdefault(r.episode, {})[r.label, r.width] = r.correct
    judged = {n: [v for v in own.values() if v is not None] for n, own in verdicts.items()}
    first: dict[tuple[bool, bool], int] = {}
    for episode, known in sorted(judged.items()):
        if known:
            first.setdefault((all(known), any(known)), episode)
    by_outcome = [first[outcome] for outcome in sorted(first, reverse=True)]
    titles = {}
    for episode in list(asked) or by_outcome or sorted(verdicts)[:1]:
        if episode not in verdicts:
            raise UsageError(f"--trees {episode}: that problem was not searched")
        known = judged[episode]
        some = "judged " if len(known) < len(verdicts[episode]) else ""
        solved = f"solved by {sum(known)} of {len(known)} {some}searches" if known else "not judged"
        titles[episode] = f"problem {episode}: {solved}"
    return titles


def take_trees(
    job: SearchJob, problems: dict[int, str], advance: Advance | None = None
) -> list[ProblemTrees]:
    """Walk and simulate the searches of `job` once more on a few problems, and film them.

    `advance(what, searches)` is called as work is done.
    """
    numbers = _ALL_NUMBERS // max(len(problems), 1)
    workers = min(job.workers, len(problems))
    alone = workers <= 1
    # Without its results: they need not travel to other processes.
    take = partial(problem_trees, replace(job), numbers, advance=advance if alone else None)
    found = []
    for taken in in_order(take, problems.items(), workers):
        found.append(taken)
        if advance and not alone:
            advance(taken.name, len(job.arms) * len(job.cells))
    return found


def problem_trees(
    job: SearchJob, numbers: int, problem: tuple[int, str], advance: Advance | None = None
) -> ProblemTrees:
    """The trees of one problem, by its number and title; `numbers` is what its films may take."""
    episode, title = problem
    needs = {signal for cell in job.cells for signal in cell.policy.reads()}
    embeddings = any(arm.uses_embeddings for arm in job.arms)
    bank = read_bank(open_trace(job.trace), episode, sorted(needs), embeddings)
    walks = [walk(arm.make(), bank, job.dedupe) for arm in job.arms]
    drawn = drawn_nodes(bank, walks)
    films: list[dict[str, Any]] = []
    room, cut, infeasible = numbers, 0, 0
    for (arm, done), cell in product(zip(job.arms, walks, strict=True), job.cells):
        if advance:
            advance(f"tree of {arm.label} {arm.width}", 1)
        if room <= 0:
            cut += 1
            continue
        film = _film(job, bank, done, arm, cell, drawn)
        if film is None:
            infeasible += 1
            continue
        films.append({"search": title, **film})
        room -= sum(len(frame["changed"]) for frame in film["frames"]) + 8 * len(film["nodes"])
    layout = {**trees.layout(records(bank, drawn)), **_texts(bank, drawn)}
    return ProblemTrees(title, layout, films, len(bank.parent), cut, infeasible)


def drawn_nodes(bank: Bank, walks: Sequence[Walk]) -> list[int]:
    """At most `MOST_NODES` thoughts, in order of number; with a thought come its ancestors.

    Those come first that most searches opened; a search that opens a thought opened its ancestors.
    """
    count = np.zeros(len(bank.parent), dtype=int)
    for done in walks:
        count[list(done.bank_node)] += 1
    order = np.lexsort((np.arange(len(count)), -count))  # the prompt is first
    return sorted(order[:MOST_NODES].tolist())


def records(bank: Bank, drawn: Sequence[int]) -> list[NodeRecord]:
    """The drawn thoughts as blocks of a tree."""
    place = {node: i for i, node in enumerate(drawn)}
    found = []
    for n in drawn:
        parent, facts = place.get(bank.parent[n], -1), (bank.depth[n], bank.tokens[n])
        found.append(
            NodeRecord(parent, *facts, bank.score[n], pruned=False, closed=bank.complete[n])
        )
    return found


def _texts(bank: Bank, drawn: Sequence[int]) -> dict[str, Any]:
    """The thoughts' numbers in the trace, depths, ends, verdicts, answers and texts."""
    episode = bank.episode
    text: dict[int, str | None] = {}
    if episode.text is not None:
        ends = np.flatnonzero(episode.kind == Kind.BOUNDARY).tolist()
        text = {int(episode.node[row]): episode.text[row] for row in ends}
    return {
        "number": list(drawn),
        "depth": [bank.depth[n] for n in drawn],
        "end": [bank.end[n] for n in drawn],
        "verdict": [bank.verdict[n] for n in drawn],
        "answer": [_shortened(bank.answer[n] or "") for n in drawn],
        "text": [_shortened(text.get(n) or "") for n in drawn],
    }


def _shortened(text: str) -> str:
    text = text.strip()
    if len(text) <= MOST_TEXT:
        return text
    return f"{text[:MOST_TEXT]} … ({len(text):,} characters)"


def fate(bank: Bank, done: Walk, node: int) -> int:
    """Why a search could not go on with a complete thought.

    0: it could; 1: the thought repeats a sibling; 2: it was recorded as a dead end, or its
    recording broke off; 3: more continuations were asked for than were recorded.
    """
    recorded = done.bank_node[node]
    if not done.dead[node]:
        return 0
    if bank.end[recorded] == End.DEAD or not bank.complete[recorded]:
        return 2
    # A repeated thought is never asked for continuations.
    asked = bank.end[recorded] != End.FINISHED and node in done.parent
    return 1 if bank.twin[recorded] != recorded and not asked else 3


def cell_name(label: str, width: int, policy: str, budget: str, many: bool) -> str:
    """The name of a search under a policy in lists; `many` if there are several policies."""
    at = "" if budget == "any" else f" at {budget}"
    return f"{label}, width {width}" + (f", {policy}{at}" if many else "")


def _film(
    job: SearchJob, bank: Bank, done: Walk, arm: Arm, cell: Cell, drawn: Sequence[int]
) -> dict[str, Any] | None:
    """One search under one policy and budget; None if the budget is too small for it."""
    film = SearchFilm(done)
    try:
        simulate(visited(done, bank.bare), cell, job.machine, watch=film.watch)
    except BudgetInfeasible:
        return None  # the command stops there, unless such searches are to be left out
    place = {node: i for i, node in enumerate(drawn)}
    shown = np.array([place.get(node, NEVER) for node in done.bank_node])
    kept, hidden = np.flatnonzero(shown != NEVER).tolist(), shown == NEVER
    frames = trees.frames([_placed(frame, shown, len(drawn)) for frame in film.frames])
    if hidden.any():  # thoughts that the search opened and the page lacks
        for each, frame in zip(frames, film.frames, strict=True):
            each["hidden"] = frame.tokens_by_tier[hidden].sum(axis=0).tolist()
    parents = np.array(done.parent)[kept]  # with a thought its ancestors are kept
    rows, count = trees.rows(np.where(parents < 0, -1, np.searchsorted(kept, parents)).tolist())
    name, budget = cell.policy.name, cell.budget.text
    return {
        "cell": cell_name(arm.label, arm.width, name, budget, len(job.cells) > 1),
        "frames": frames,
        "nodes": shown[kept].tolist(),
        "row": rows,
        "rows": count,
        "unseen": len(shown) - len(kept),
        **{key: [at[n] for n in kept] for key, at in film.times().items()},
        "fate": [fate(bank, done, n) for n in kept],
        "handed": int(shown[done.answer]),
        "correct": done.correct,
    }


def _placed(frame: Frame, shown: np.ndarray, nodes: int) -> Frame:
    """A frame in the layout's numbers; what is not drawn is left out."""
    table = np.zeros((nodes, NUM_TIERS), dtype=np.int64)
    table[shown[shown != NEVER]] = frame.tokens_by_tier[shown != NEVER]
    active = shown[list(frame.active)]
    return replace(frame, active=tuple(active[active != NEVER].tolist()), tokens_by_tier=table)
