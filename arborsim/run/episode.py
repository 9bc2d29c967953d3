"""Replaying one episode of a trace under any number of policies and budgets.

The unit of work of `arborsim.run.replay`: it can run in a process of its own, so everything that
goes in and comes out can be pickled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from arborsim.core.budget import Budget
from arborsim.core.errors import BudgetInfeasible, UsageError
from arborsim.core.observations import Signal
from arborsim.core.tiers import Tier
from arborsim.policies.base import Policy
from arborsim.run.controller import Controller, Meter
from arborsim.run.film import TreeFilm, node_records
from arborsim.run.meters import AttentionKept
from arborsim.run.output_error import OutputError
from arborsim.run.results import EpisodeResult, TreePicture
from arborsim.run.token_map import TokenMap, TokenMapper
from arborsim.trace.play import play
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import Kind

if TYPE_CHECKING:
    from arborsim.machine.executor import SimulatedExecutor
    from arborsim.machine.profile import HardwareProfile
    from arborsim.trace.episode import Episode
    from arborsim.trace.schema import Geometry, TraceInfo


@dataclass(frozen=True)
class Machine:
    """What the searches are replayed on.

    Attributes
    ----------
    profile : HardwareProfile
    geometry : Geometry or None
        Model whose bytes and seconds are charged; None for the recorded model's own.
    recall : {"stage", "stream", "near", "ondemand"}
        How tokens in DDR take part in attention.
    page_tokens : int
        KV slots per page.
    tree_attention : bool
        Whether shared ancestors are read once per batch, or once per branch.
    event_by_event : bool
        Simulate every decode iteration as an event of its own (slower, the same to rounding).
    explain : bool
        Keep every term of the time apart (`EpisodeResult.terms`).
    keep_matrices : bool
        A prefill that writes attention matrices out holds those of all layers at once.
    """

    profile: HardwareProfile
    geometry: Geometry | None = None
    recall: str = "stage"
    page_tokens: int = 1
    tree_attention: bool = True
    event_by_event: bool = False
    explain: bool = False
    keep_matrices: bool = False

    def executor(self, policy: Policy, recorded: TraceInfo) -> SimulatedExecutor:
        """A simulated machine for one search of a trace under `policy`.

        Raises
        ------
        UsageError
            The policy has no meaning on the model: see `unsuited`.
        """
        from arborsim.machine.executor import SimulatedExecutor

        geometry = self.geometry or recorded.geometry
        if why := unsuited(policy, geometry):
            raise UsageError(why)
        return SimulatedExecutor(
            geometry,
            self.profile,
            groups=num_groups(policy, recorded),
            page_tokens=self.page_tokens,
            recall=self.recall,
            policy=policy.name,
            fused=policy.fused,
            tree_attention=self.tree_attention,
            event_by_event=self.event_by_event,
            explain=self.explain,
            keep_matrices=self.keep_matrices,
        )


def unsuited(policy: Policy, geometry: Geometry) -> str:
    """Why `policy` has no meaning on a model of this geometry; empty if it has."""
    tiers = policy.method.tiers
    if not geometry.full_layers and any(tier != Tier.HBM for tier in tiers):
        return (
            f"every layer of {geometry.name} forgets what its window of {geometry.window} tokens "
            f"has passed: there is nothing left that policy {policy.name} could manage"
        )
    if geometry.latent_dim and policy.grouping == "head":
        return (
            f"policy {policy.name} decides for each KV head, and {geometry.name} keeps one latent "
            "vector of a token for all heads: use a policy that decides per layer or for the model"
        )
    if geometry.kv_bytes_per_element == 1 and Tier.HBM_QUANTISED in tiers:
        return (
            f"policy {policy.name} moves tokens to 8 bits, and the cache of {geometry.name} is in "
            "8 bits already: use a policy that does not, or a cache in bf16"
        )
    return ""


def num_groups(policy: Policy, recorded: TraceInfo) -> int:
    """Cache groups that the plans of `policy` tell apart on a trace: see `Policy.grouping`."""
    layers = len(recorded.qkv_layers)
    return {"shared": 1, "layer": layers, "head": layers * recorded.geometry.kv_heads}[
        policy.grouping
    ]


def foresee(policy: Policy, episode: Episode, budget_tokens: int) -> Episode:
    """The episode with what `policy` may know of its future under this budget, if anything."""
    if Signal.EVICTION_TIME not in policy.reads():
        return episode
    from arborsim.trace.offline import with_eviction_times

    protected = policy.protection(budget_tokens)
    prompt_tokens = int(np.count_nonzero(episode.kind == Kind.PREFILL))
    return with_eviction_times(
        episode, budget_tokens, protected.head(prompt_tokens), protected.recent
    )


@dataclass(frozen=True)
class Cell:
    """One policy under one budget."""

    policy: Policy
    budget: Budget


@dataclass(frozen=True)
class Unit:
    """One episode of a trace, and what to replay it under.

    Attributes
    ----------
    name : str
        What the trace is called in results.
    trace : Path
    episode : int
    cells : tuple of Cell
    needs : tuple of Signal
        What to read from the trace: for policies, and for quality.
    machine : Machine
    attention_kept, output_error : bool
        Which quality figures to take.
    pictures : bool
        Take pictures for the report.
    """

    name: str
    trace: Path
    episode: int
    cells: tuple[Cell, ...]
    needs: tuple[Signal, ...]
    machine: Machine
    attention_kept: bool
    output_error: bool
    pictures: bool


@dataclass(frozen=True)
class Outcome:
    """What came of one cell: a result (with pictures if asked for), or an infeasible budget.

    `rows` and `tokens` are those of the episode.
    """

    trace: str
    episode: int
    rows: int
    tokens: int
    cell: Cell
    result: EpisodeResult | None = None
    picture: TreePicture | None = None
    token_map: TokenMap | None = None
    infeasible: BudgetInfeasible | None = None


def play_unit(unit: Unit, advance: Callable[[str, int], None] | None = None) -> list[Outcome]:
    """Replay the unit's episode under each of its cells, in their order.

    Parameters
    ----------
    unit : Unit
    advance : callable, optional
        Called with what was done and its number of rows, after each cell.
    """
    reader = TraceReader(unit.trace)
    (episode,) = reader.episodes(unit.needs, start=unit.episode, stop=unit.episode + 1)
    outcomes = []
    for cell in unit.cells:
        nothing = Outcome(unit.name, episode.index, episode.num_rows, episode.num_tokens, cell)
        try:
            outcomes.append(_play(unit, episode, nothing))
        except BudgetInfeasible as error:
            outcomes.append(replace(nothing, infeasible=error))
        if advance:
            advance(f"{unit.name} {cell.policy.name}", episode.num_rows)
    return outcomes


def _play(unit: Unit, episode: Episode, outcome: Outcome) -> Outcome:
    """Fill in the outcome of its cell."""
    cell = outcome.cell
    kept = AttentionKept() if unit.attention_kept else None
    error = OutputError() if unit.output_error else None
    iterations = len(np.unique(episode.iteration[episode.kind == Kind.TOKEN]))
    mapper = TokenMapper(episode.num_tokens, iterations) if unit.pictures else None
    film = TreeFilm() if unit.pictures else None
    meters: tuple[Meter | None, ...] = (kept, error, mapper)
    geometry = episode.info.geometry
    executor = unit.machine.executor(cell.policy, episode.info)
    budget_tokens = cell.budget.in_tokens(episode.num_tokens)
    controller = Controller(
        cell.policy,
        executor,
        budget_tokens=budget_tokens,
        layers=geometry.layers,
        vocabulary=geometry.vocab,
        meters=[meter for meter in meters if meter is not None],
    )
    for event in play(foresee(cell.policy, episode, budget_tokens)):
        controller.handle(event)
        if film:
            film.take(event, controller)
    name, text = cell.policy.name, cell.budget.text
    result = EpisodeResult(
        unit.name,
        episode.index,
        name,
        text,
        budget_tokens,
        executor.measurements(),
        kept.share if kept else math.nan,
        (unit.machine.geometry or geometry).kv_bytes_per_token,
        error.error if error else math.nan,
        cell.policy.bounded,
        executor.terms(),
    )
    if not film or not mapper:
        return replace(outcome, result=result)
    nodes = node_records(controller.tree)
    where = (name, text, unit.name, episode.index)
    return replace(
        outcome,
        result=result,
        picture=TreePicture(*where, nodes, film.frames(len(nodes))),
        token_map=TokenMap(
            *where, mapper.first_tokens, mapper.iterations, mapper.finish(executor.tier)
        ),
    )
