"""Comparisons at equal memory: each policy at the budget where it takes what a reference takes.

A budget counts tokens, and policies turn them into bytes in their own ways: quantised tokens are
smaller, staged ones come on top, and some methods hold more than their budget.  Here the memory is
given, and the budget of each policy is found by bisection, trace by trace.  The memory is a share
of full retention's, or what a reference policy takes at a budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from arborsim.core.errors import ArborsimError, BudgetInfeasible, UnknownName, UsageError
from arborsim.core.tiers import Budget
from arborsim.core.units import quantity
from arborsim.core.workers import in_order
from arborsim.machine.executor import SimulatedExecutor
from arborsim.play import served
from arborsim.play.episode import Cell, play_episode
from arborsim.play.results import BASELINE, EqualBudget, LeftOut
from arborsim.policies.base import Policy
from arborsim.policies.registry import build
from arborsim.products.choices import ChosenPolicies
from arborsim.products.replay.run import Fixed, Replay
from arborsim.trace.reader import TraceReader, open_trace

#: What can be equal: the largest KV footprint in HBM of any search, or its integral over time,
#: summed over searches.  How each is called in `Measurements`.
MEASURES = {"peak": "peak_hbm_kv_bytes", "byte-seconds": "hbm_byte_seconds"}
#: Shares are sought in steps of one of these.
STEPS = 1000
#: The largest error of what counts as equal, as a share of the memory wanted.
TOLERANCE = 0.05


def at_equal_memory(
    job: Replay,
    measure: str,
    reference: Policy | None = None,
    advance: Callable[[str, int], None] | None = None,
) -> Replay:
    """The same replay, with each policy at the budget where its memory is the reference's.

    Rows keep the label of the budget that was asked for. `ReplayResult.equal` says which budget was
    found, and the memory wanted and held.  Policies that know no budget run as they are.  A policy
    that comes within `TOLERANCE` of the memory at no budget is left out, with the reason.

    Parameters
    ----------
    job : Replay
        Its budgets say how much memory: a share of full retention's, or what `reference` takes.
    measure : str
        A key of `MEASURES`.
    reference : Policy, optional
        The policy that has the budgets as they are.
    advance : callable, optional
        Called with what is done, and no rows: how many replays it takes is not known before.

    Raises
    ------
    UsageError
        A budget is a number of tokens, and there is no `reference`.
    ArborsimError
        Nothing that was asked for comes near the memory.
    """
    if measure not in MEASURES:
        raise UnknownName("measure of equal memory", measure, MEASURES)
    for budget in job.budgets:
        if budget.share is None and reference is None:
            raise UsageError(
                f"equal {measure}: budget {budget.text} is a number of tokens; give shares of full "
                "retention's memory, or name a reference, whose memory at this budget is meant"
            )
    readers = job.open()
    units = []
    cells: dict[str, list[Cell]] = {}
    for reader in readers:
        if reference is not None:
            served.require(reference, reader, f"reference {reference.name}")
        own = job.cells(reader)
        units += [(reader.path, cell) for cell in own if cell.policy.uses_budget]
        cells[job.name_of(reader)] = [cell for cell in own if not cell.policy.uses_budget]
    equal, left_out = [], []
    for found in in_order(partial(_find, job, measure, reference), units, job.workers):
        if isinstance(found, LeftOut):
            left_out.append(found)
        else:
            equal.append(found.equal)
            cells[found.equal.trace].append(found.cell)
        if advance:
            advance("looking for budgets", 0)
    runs = any(job.asks_for(cell.policy) for own in cells.values() for cell in own)
    if left_out and (job.strict or not runs):
        first = left_out[0]
        raise ArborsimError(f"{first.trace}: {first.policy} {first.reason}")
    whose = f"what {reference.name} takes at it" if reference else "that share of full retention's"
    what = "HBM peak" if measure == "peak" else "HBM byte-seconds"
    note = (
        f"Equal {what}: under each budget every policy takes {whose}, within {TOLERANCE:.0%}; "
        "found is the budget at which it does."
    )
    return replace(job, fixed=Fixed(cells, tuple(equal), tuple(left_out), note))


@dataclass(frozen=True)
class _Found:
    cell: Cell
    equal: EqualBudget


def _find(
    job: Replay, measure: str, reference: Policy | None, unit: tuple[Path, Cell]
) -> _Found | LeftOut:
    """The budget at which the cell's policy takes what is wanted under the cell's budget."""
    path, cell = unit
    reader = open_trace(path)
    name, label, asked = job.name_of(reader), cell.policy.label, cell.budget

    def held(policy: Policy, budget: Budget) -> float | None:
        return memory(job, reader, measure, Cell(policy, budget))

    def left_out(reason: str) -> LeftOut:
        return LeftOut(name, label, asked.text, reason=reason, detail=reason)

    wanted = held(reference or build(BASELINE), asked)
    if reference is None:
        assert asked.share is not None
        assert wanted is not None
        wanted *= asked.share
    if wanted is None:
        assert reference is not None
        return left_out(f"the reference, {reference.name}, cannot run at budget {asked.text}")

    steps = STEPS if asked.share is not None else _most_tokens(job, reader)

    def budget_of(step: int) -> Budget:
        if asked.share is not None:
            return replace(asked, share=step / steps)
        return replace(asked, tokens=step)

    below, above = bracket(lambda step: held(cell.policy, budget_of(step)), steps, wanted)
    known = [each for each in (below, above) if each is not None]
    if not known:
        return left_out("no budget is enough")
    step, got = min(known, key=lambda each: abs(each[1] - wanted))
    if abs(got - wanted) > TOLERANCE * wanted:
        takes = [
            f"{_amount(measure, value)} at budget {_text(budget_of(at))}" for at, value in known
        ]
        least = "at least " if below is None else "at most " if above is None else ""
        return left_out(f"takes {least}{' and '.join(takes)}, not {_amount(measure, wanted)}")
    found = budget_of(step)
    equal = EqualBudget(name, label, asked.text, _text(found), measure, wanted, got)
    return _Found(Cell(cell.policy, found), equal)


def memory(job: Replay, reader: TraceReader, measure: str, cell: Cell) -> float | None:
    """The memory of a cell over the chosen episodes of a trace, in bytes or byte-seconds.

    None if the budget cannot hold one of the searches.
    """
    needs = tuple(sorted(cell.policy.reads()))
    found = []
    for number in job.chosen(reader):
        (episode,) = reader.episodes(needs, start=number, stop=number + 1)
        executor = SimulatedExecutor.of(job.machine, cell.policy, episode.info)
        try:
            played = play_episode(episode, cell, executor)
        except BudgetInfeasible:
            return None
        found.append(float(getattr(played.measured, MEASURES[measure])))
    return max(found) if measure == "peak" else math.fsum(found)


def bracket(
    held: Callable[[int], float | None], most: int, wanted: float
) -> tuple[tuple[int, float] | None, tuple[int, float] | None]:
    """The neighbouring steps between which `held` passes `wanted`, and what each holds.

    Steps are 1 to `most`.  By bisection: `held` grows with the step, and is None for steps that are
    too small.  The first holds at most what is wanted, the second more. None where there is none.
    Where `held` falls again (decisions stop near full retention, which saves byte-seconds), the two
    are one place of several where it passes.
    """
    low, high = 0, most + 1
    below = above = None
    step = most  # nothing to look for where even the largest is not enough
    while high - low > 1:
        got = held(step)
        if got is not None and got > wanted:
            high, above = step, (step, got)
        else:
            low, below = step, None if got is None else (step, got)
        step = (low + high) // 2
    return below, above


def _most_tokens(job: Replay, reader: TraceReader) -> int:
    """The tokens of the largest search: more than that no budget needs."""
    chosen = job.chosen(reader)
    return max(e.num_tokens for e in reader.episodes((), start=chosen.start, stop=chosen.stop))


def _text(budget: Budget) -> str:
    return f"{budget.share:g}" if budget.tokens is None else f"{budget.tokens}"


def _amount(measure: str, value: float) -> str:
    return quantity("bytes" if measure == "peak" else "byte-seconds", value)


def reference_of(given: str | Policy, made: Sequence[Policy]) -> Policy | None:
    """The policy whose memory is meant, with the settings of the one in the comparison."""
    if not given:
        return None
    (policy,) = ChosenPolicies([given]).build({})
    policy = next((each for each in made if each.name == policy.name), policy)
    if not policy.uses_budget:
        raise UsageError(f"reference {policy.name} knows no budget: name a policy that does")
    return policy
