"""Trees of a few problems for the page of a search: recorded thoughts, and searches on them.

A problem's thoughts are laid out once; each search has its own film on that layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from arborsim.bank.arms import Arm
from arborsim.bank.bank import Bank, read_bank
from arborsim.bank.job import SearchJob, simulate
from arborsim.bank.results import SearchResult
from arborsim.bank.visited import visited
from arborsim.bank.walk import Walk, walk
from arborsim.core.errors import BudgetInfeasible, UsageError
from arborsim.core.observations import Signal
from arborsim.core.tiers import NUM_TIERS
from arborsim.core.workers import in_order
from arborsim.run.episode import Cell
from arborsim.run.pictures import Frame, NodeRecord, TreePicture
from arborsim.show import trees
from arborsim.show.search_film import NEVER, SearchFilm
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import End, Kind

#: Thoughts of one problem that are drawn, and characters of each that are shown.
MOST_NODES = 2_000
MOST_TEXT = 600


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
    return [
        NodeRecord(
            place.get(bank.parent[n], -1), bank.depth[n], bank.tokens[n], bank.score[n],
            pruned=False, closed=bank.complete[n],
        )
        for n in drawn
    ]  # fmt: skip


def layout_of(bank: Bank, drawn: Sequence[int], nodes: Sequence[NodeRecord]) -> dict[str, Any]:
    """Places and facts of the drawn thoughts, for the page's scripts."""
    return {**trees.layout(nodes), **trees.facts(nodes), **_said(bank, drawn)}


def _said(bank: Bank, drawn: Sequence[int]) -> dict[str, Any]:
    """What the thoughts are: numbers in the trace, depths, ends, verdicts, answers and texts."""
    episode = bank.episode
    text: dict[int, str] = {}
    for row in np.flatnonzero(episode.kind == Kind.BOUNDARY).tolist():
        said = None if episode.text is None else episode.text[row]
        if said:
            text[int(episode.node[row])] = _shortened(said)
    return {
        "number": list(drawn),
        "depth": [bank.depth[n] for n in drawn],
        "end": [bank.end[n] for n in drawn],
        "verdict": [bank.verdict[n] for n in drawn],
        "answer": [_shortened(bank.answer[n] or "") for n in drawn],
        "text": [text.get(n, "") for n in drawn],
    }


def _shortened(text: str) -> str:
    text = text.strip()
    if len(text) <= MOST_TEXT:
        return text
    return f"{text[:MOST_TEXT]} … ({len(text):,} characters)"


def fate(bank: Bank, done: Walk, node: int) -> int:
    """Why a search could not go on with a complete thought.

    Returns
    -------
    int
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


#: Numbers that the films of a page may take together: about 4 bytes each.
_ALL_NUMBERS = 1_500_000

Advance = Callable[[str, int], None]


@dataclass(frozen=True)
class TreeUnit:
    """One problem, and the searches to film on it; can be pickled."""

    job: SearchJob
    episode: int
    title: str
    numbers: int  #: that the films may take


@dataclass(frozen=True)
class ProblemTrees:
    """Plain data for the page."""

    title: str
    layout: dict[str, Any]  #: places and facts of the problem's drawn thoughts
    films: list[dict[str, Any]]  #: one per search, policy and budget
    #: Thoughts of the problem; films that found no room on the page, or whose budget is too small
    #: for the search.
    recorded: int
    cut: int = 0
    infeasible: int = 0

    @property
    def name(self) -> str:
        return self.title.partition(":")[0]

    def notes(self) -> Iterator[str]:
        """What is not on the page."""
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


def cell_name(label: str, width: int, policy: str, budget: str, many: bool) -> str:
    """What a search under a policy is called in lists; `many` if there are several policies."""
    at = "" if budget == "any" else f" at {budget}"
    return f"{label}, width {width}" + (f", {policy}{at}" if many else "")


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
    for episode in asked:
        if episode not in verdicts:
            raise UsageError(f"--trees {episode}: that problem was not searched")
    first: dict[str, int] = {}
    for episode in sorted(verdicts):
        first.setdefault(_outcome(verdicts[episode].values()), episode)
    ranked = ("all", "some", "none")
    shown = list(asked) or [first[kind] for kind in ranked if kind in first]
    shown = shown or sorted(verdicts)[:1]
    return {episode: _title(episode, list(verdicts[episode].values())) for episode in shown}


def _outcome(verdicts: Any) -> str:
    known = [v for v in verdicts if v is not None]
    if not known:
        return "unknown"
    return "all" if all(known) else "some" if any(known) else "none"


def _title(episode: int, verdicts: Sequence[bool | None]) -> str:
    known = [v for v in verdicts if v is not None]
    judged = "" if len(known) == len(verdicts) else "judged "
    solved = f"solved by {sum(known)} of {len(known)} {judged}searches" if known else "not judged"
    return f"problem {episode}: {solved}"


def take_trees(
    job: SearchJob, problems: dict[int, str], advance: Advance | None = None
) -> list[ProblemTrees]:
    """Walk and simulate the searches of `job` once more on a few problems, and film them.

    `advance(what, searches)` is called as work is done.
    """
    numbers = _ALL_NUMBERS // max(len(problems), 1)
    bare = replace(job)  # without its results: they need not travel to other processes
    units = [TreeUnit(bare, episode, title, numbers) for episode, title in problems.items()]
    alone = job.workers == 1 or len(units) == 1
    take = partial(problem_trees, advance=advance if alone else None)
    found = []
    for taken in in_order(take, units, 1 if alone else min(job.workers, len(units))):
        found.append(taken)
        if advance and not alone:
            advance(taken.name, len(job.arms) * len(job.cells))
    return found


def problem_trees(unit: TreeUnit, advance: Advance | None = None) -> ProblemTrees:
    """The trees of one problem."""
    job = unit.job
    needs: set[Signal] = {signal for cell in job.cells for signal in cell.policy.reads()}
    embeddings = any(arm.uses_embeddings for arm in job.arms)
    bank = read_bank(TraceReader(job.trace), unit.episode, sorted(needs), embeddings)
    walks = [walk(arm.make(), bank, job.dedupe) for arm in job.arms]
    drawn = drawn_nodes(bank, walks)
    drawn_records = records(bank, drawn)
    films: list[dict[str, Any]] = []
    room, cut, infeasible = unit.numbers, 0, 0
    for (arm, done), cell in product(zip(job.arms, walks, strict=True), job.cells):
        if advance:
            advance(f"tree of {arm.label} {arm.width}", 1)
        if room <= 0:
            cut += 1
            continue
        film = _film(unit, bank, done, arm, cell, drawn, drawn_records)
        if film is None:
            infeasible += 1
            continue
        films.append(film)
        room -= sum(len(frame["changed"]) for frame in film["frames"]) + 8 * len(film["nodes"])
    layout = layout_of(bank, drawn, drawn_records)
    return ProblemTrees(unit.title, layout, films, len(bank.parent), cut, infeasible)


def _film(
    unit: TreeUnit,
    bank: Bank,
    done: Walk,
    arm: Arm,
    cell: Cell,
    drawn: Sequence[int],
    nodes: Sequence[NodeRecord],
) -> dict[str, Any] | None:
    """One search under one policy and budget; None if the budget is too small for it."""
    job, film = unit.job, SearchFilm(done)
    try:
        simulate(visited(done, bank.bare), cell, job.machine, watch=film.watch)
    except BudgetInfeasible:
        return None  # the command stops there, unless it was told to leave such searches out
    place = {node: i for i, node in enumerate(drawn)}
    shown = [place.get(node, NEVER) for node in done.bank_node]
    kept = [n for n, i in enumerate(shown) if i != NEVER]
    name, budget = cell.policy.name, cell.budget.text
    frames = tuple(_placed(frame, shown, len(drawn)) for frame in film.frames)
    picture = TreePicture(name, budget, job.trace.name, unit.episode, tuple(nodes), frames)
    rows, count = trees.rows([_own(done, n, kept) for n in kept])
    return {
        "search": unit.title,
        "cell": cell_name(arm.label, arm.width, name, budget, len(job.cells) > 1),
        "frames": _with_hidden(trees.frames(picture), film.frames, shown),
        "nodes": [shown[n] for n in kept],
        "row": rows,
        "rows": count,
        "unseen": len(shown) - len(kept),
        **{key: [at[n] for n in kept] for key, at in film.times().items()},
        "fate": [fate(bank, done, n) for n in kept],
        "handed": shown[done.answer],
        "correct": done.correct,
    }


def _with_hidden(
    drawn: list[dict[str, Any]], frames: Sequence[Frame], shown: Sequence[int]
) -> list[dict[str, Any]]:
    """Frames with the tokens by tier of thoughts that the search opened and the page lacks."""
    lacking = np.asarray(shown) == NEVER
    if not lacking.any():
        return drawn
    return [
        {**each, "hidden": frame.tokens_by_tier[lacking].sum(axis=0).tolist()}
        for each, frame in zip(drawn, frames, strict=True)
    ]


def _own(done: Walk, node: int, kept: Sequence[int]) -> NodeRecord:
    """A node as the search's own tree has it: only its parent's place among `kept` matters."""
    parent = done.parent[node]
    at = -1 if parent < 0 else int(np.searchsorted(kept, parent))
    return NodeRecord(at, done.depth[node], done.tokens[node], math.nan, False, True)


def _placed(frame: Frame, shown: Sequence[int], nodes: int) -> Frame:
    """A frame in the layout's numbers; what is not drawn is left out."""
    table = np.zeros((nodes, NUM_TIERS), dtype=np.int64)
    for node, at in enumerate(shown):
        if at != NEVER:
            table[at] = frame.tokens_by_tier[node]
    active = tuple(shown[node] for node in frame.active if shown[node] != NEVER)
    return replace(frame, active=active, tokens_by_tier=table)
