"""Searches of a workload replayed under its policies: in units that processes share."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from arborsim.core.errors import BudgetInfeasible, UsageError
from arborsim.core.observations import Signal
from arborsim.machine.machine import Machine, unsuited
from arborsim.plan.demands import Recorded, Variant, VariantDemands, drawn
from arborsim.plan.workload import Workload
from arborsim.run.meters import AttentionKept
from arborsim.run.record import record_demand
from arborsim.trace.episode import Episode
from arborsim.trace.reader import TraceReader

_CHUNK = 8  # episodes that a process takes at a time


@dataclass(frozen=True)
class Unit:
    """Episodes of one trace to record under one variant, in a process of its own.

    Attributes
    ----------
    variant, order : int
        Number of `how`, and of the unit among the variant's.
    how : Variant
    entry : int
    episodes : tuple of int
    trace : Path
    shared_tokens : int
        Beginning of the prompts that the entry's searches have in common.
    machine : Machine
    """

    variant: int
    order: int
    how: Variant
    entry: int
    episodes: tuple[int, ...]
    trace: Path
    shared_tokens: int
    machine: Machine


def record_unit(unit: Unit) -> list[Recorded] | str:
    """Record the unit's searches, or say why its variant cannot keep one of them."""
    policy = unit.how.policy.policy
    assert unit.machine.geometry is not None
    if why := unsuited(policy, unit.machine.geometry):
        return why
    reader = TraceReader(unit.trace)
    attention = reader.has(Signal.ATTENTION)
    reads = tuple(sorted(policy.reads() | ({Signal.ATTENTION} if attention else set())))
    found = []
    for number in unit.episodes:
        (episode,) = reader.episodes(reads, start=number, stop=number + 1)
        try:
            found.append(_record(unit, episode, attention))
        except (BudgetInfeasible, UsageError) as error:
            return f"{reader.path.name}, episode {number}: {error}"
    return found


def _record(unit: Unit, episode: Episode, attention: bool) -> Recorded:
    policy, shared = unit.how.policy.policy, unit.shared_tokens
    meter = AttentionKept() if attention else None
    demand, measured = record_demand(
        episode, policy, unit.how.budget, unit.machine, f"mix {unit.entry}" if shared else "",
        shared, unit.trace.name, [meter] if meter else [],
    )  # fmt: skip
    if demand.prompt_tokens < shared:  # only prompts that are as short have all of it in common
        short = demand.prompt_tokens
        info = replace(demand.info, prefix=f"mix {unit.entry}, {short}", prefix_tokens=short)
        demand = replace(demand, info=info)
    tokens = measured.prompt_tokens + measured.generated_tokens
    return Recorded(
        demand,
        meter.share if meter else math.nan,
        measured.peak_hbm_kv_tokens / tokens,
        measured.evicted_tokens / tokens,
        measured.quantised_tokens / tokens,
        measured.offloaded_tokens / tokens,
        measured.rehydrated_tokens / tokens,
    )


def units_of(
    workload: Workload, number: int, variant: Variant, traces: Sequence[Path]
) -> list[Unit]:
    """What must be recorded for a variant, a few searches at a time.

    Parameters
    ----------
    workload : Workload
    number : int
        The variant's.
    variant : Variant
    traces : sequence of Path
        One per entry of the mix (`Workload.write_traces`).
    """
    places = drawn(workload)
    machine = Machine(
        variant.profile,
        workload.geometry,
        variant.recall,
        workload.page_tokens,
        workload.tree_attention,
    )
    found: list[Unit] = []
    for entry, kind in enumerate(workload.mix):
        episodes = [episode for other, episode in places if other == entry]
        for first in range(0, len(episodes), _CHUNK):
            part = tuple(episodes[first : first + _CHUNK])
            shared = kind.shared_prompt_tokens
            found.append(
                Unit(number, len(found), variant, entry, part, traces[entry], shared, machine)
            )
    return found


class Recording:
    """A variant's units, handed out one by one, and put together again.

    Parameters
    ----------
    variant : Variant
    units : sequence of Unit
    places : tuple of (int, int)
    """

    def __init__(
        self, variant: Variant, units: Sequence[Unit], places: tuple[tuple[int, int], ...]
    ) -> None:
        self._variant = variant
        self._left = deque(units)
        self._places = places
        self._under_way = 0
        self._found: dict[int, list[Recorded]] = {}
        self._infeasible: dict[int, str] = {}

    @property
    def exhausted(self) -> bool:
        """Whether there is nothing more to record: nothing is left, or a search is infeasible."""
        return not self._left or bool(self._infeasible)

    def next_unit(self) -> Unit:
        """Another one to record."""
        self._under_way += 1
        return self._left.popleft()

    def add(self, unit: Unit, result: list[Recorded] | str) -> None:
        self._under_way -= 1
        if isinstance(result, str):
            self._infeasible[unit.order] = result
        else:
            self._found[unit.order] = result

    @property
    def complete(self) -> bool:
        return not self._under_way and self.exhausted

    def together(self) -> VariantDemands:
        """All of it; the reason is that of the first unit that has one, whoever was faster."""
        if self._infeasible:
            reason = self._infeasible[min(self._infeasible)]
            return VariantDemands(self._variant, self._places, (), reason)
        ordered = [each for order in sorted(self._found) for each in self._found[order]]
        return VariantDemands(self._variant, self._places, tuple(ordered))


def record_variant(workload: Workload, variant: Variant, traces: Sequence[Path]) -> VariantDemands:
    """The demands of a workload's searches under one variant."""
    recording = Recording(variant, units_of(workload, 0, variant, traces), drawn(workload))
    while not recording.exhausted:
        unit = recording.next_unit()
        recording.add(unit, record_unit(unit))
    return recording.together()
