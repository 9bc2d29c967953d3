"""What policies cost in live searches: more than their decisions alone.

A live search takes signals off the model, keeps scores up to date, lets the controller make a plan
and moves tensors.  For a policy that was timed, the profile says what an iteration, a turn to other
thoughts, a sequence of either, and a decision take (`seconds_of`).  For one that was not, all of it
is charged per decision, as a median over the others; what attention takes longer where its rows are
wanted is told per layer of an iteration (`fit_policies`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from arborsim.machine.policy_seconds import PolicySeconds


class Quiet(NamedTuple):
    """A policy in a search whose budget holds everything: nothing is decided.

    Attributes
    ----------
    lanes : int
        Sequences that decode together.
    thought : int
        Iterations between two turns.
    per_iteration_s : float
        The policy's seconds, turns included, per iteration.
    """

    lanes: int
    thought: int
    per_iteration_s: float


@dataclass(frozen=True)
class PolicyTime:
    """One search under one policy, and the same search under full retention.

    Attributes
    ----------
    name : str
    rows, quantises : bool
        Whether the policy reads attention rows, and whether it rounds tokens.
    layers : int
    tokens : float
        Tokens on the path where decisions are made, mean.
    iterations, turns, decisions : int
        `turns` are from one thought to the next.
    decode_s, policy_s : float
        Of all iterations.
    full_decode_s, full_policy_s : float
        The same under full retention.
    quiet : tuple of Quiet
        Searches whose budget holds everything.
    """

    name: str
    rows: bool
    quantises: bool
    layers: int
    tokens: float
    iterations: int
    decisions: int
    decode_s: float
    policy_s: float
    full_decode_s: float
    full_policy_s: float
    quiet: tuple[Quiet, ...] = ()
    turns: int = 0

    @property
    def decides_often(self) -> bool:
        """Whether the search says something about what a decision takes."""
        return self.decisions * 4 >= self.iterations

    @property
    def decision_s(self) -> float:
        """Seconds per decision beyond what full retention handles."""
        return max(0.0, self.policy_s - self.full_policy_s) / self.decisions


@dataclass(frozen=True)
class PolicyCost:
    """The cost model's numbers; medians over policies.

    Attributes
    ----------
    base_s, per_token_s : float
        A decision of a policy that reads no attention.
    rows_s : float
        What is added to it where attention rows are read.
    eager_per_layer_s : float
        What an iteration takes longer where attention rows are read, per layer.
    """

    base_s: float
    per_token_s: float
    rows_s: float
    eager_per_layer_s: float


def fit_policies(times: Sequence[PolicyTime]) -> PolicyCost | None:
    """None without both a policy that reads attention and one that does not.

    Policies that hardly ever decide say little about a decision; those that round tokens read them
    more slowly, which is not the rows' doing.
    """
    often = [one for one in times if one.decides_often]
    blind, seeing = ([one for one in often if one.rows == rows] for rows in (False, True))
    if not blind or not seeing:
        return None
    base_s, per_token_s = _line(blind)
    rows_s = _median(one.decision_s - base_s - per_token_s * one.tokens for one in seeing)
    slower_s = _median(
        (one.decode_s - one.full_decode_s) / (one.iterations * one.layers)
        for one in times
        if one.rows and not one.quantises
    )
    return PolicyCost(base_s, per_token_s, max(0.0, rows_s), max(0.0, slower_s))


def seconds_of(
    times: Sequence[PolicyTime], decisions: Mapping[str, tuple[float, float]]
) -> dict[str, PolicySeconds]:
    """What each policy takes that was also timed without decisions, in order of the timing.

    Parameters
    ----------
    times : sequence of PolicyTime
    decisions : mapping of str to tuple of float
        Base and seconds per token of `Policy.decide` alone: for policies that hardly ever decided,
        whose searches say little about a decision.
    """
    by_name: dict[str, list[PolicyTime]] = {}
    for one in times:
        if one.quiet:
            by_name.setdefault(one.name, []).append(one)
    return {
        name: _own_seconds(each, decisions.get(name, (0.0, 0.0))) for name, each in by_name.items()
    }


def _own_seconds(times: Sequence[PolicyTime], alone: tuple[float, float]) -> PolicySeconds:
    quiet = _quiet_seconds(times[0].quiet)
    taken = sorted(
        (one.tokens, max(0.0, one.policy_s - _without_decisions_s(one, quiet)) / one.decisions)
        for one in times
        if one.decides_often
    )
    if not taken:
        return replace(quiet, decision_base_s=alone[0], decision_per_token_s=alone[1])
    (fewer, less_s), (more, more_s) = taken[0], taken[-1]
    slope_s = max(0.0, (more_s - less_s) / (more - fewer)) if more > fewer else 0.0
    base_s = float(np.mean([s - slope_s * tokens for tokens, s in taken]))
    return replace(quiet, decision_base_s=max(0.0, base_s), decision_per_token_s=slope_s)


def _quiet_seconds(quiet: Sequence[Quiet]) -> PolicySeconds:
    """What iterations and turns take: over lengths of thoughts, then over lanes."""
    by_lanes: dict[int, list[Quiet]] = {}
    for one in quiet:
        by_lanes.setdefault(one.lanes, []).append(one)
    pairs = {lanes: _iteration_and_turn(each) for lanes, each in by_lanes.items()}
    (iteration_s, lane_s), (turn_s, turn_lane_s) = (
        _base_and_slope({lanes: pair[i] for lanes, pair in pairs.items()}) for i in (0, 1)
    )
    return PolicySeconds(iteration_s, lane_s, turn_s, turn_lane_s)


def _iteration_and_turn(quiet: Sequence[Quiet]) -> tuple[float, float]:
    """Seconds of an iteration, and of a turn, which longer thoughts spread over more iterations."""
    ordered = sorted(quiet, key=lambda one: one.thought)
    short, long = ordered[0], ordered[-1]
    if short.thought == long.thought:
        return long.per_iteration_s, 0.0
    rate = 1 / short.thought - 1 / long.thought
    turn_s = max(0.0, (short.per_iteration_s - long.per_iteration_s) / rate)
    return max(0.0, long.per_iteration_s - turn_s / long.thought), turn_s


def _base_and_slope(seconds: Mapping[int, float]) -> tuple[float, float]:
    """Neither negative."""
    few, many = min(seconds), max(seconds)
    slope = max(0.0, (seconds[many] - seconds[few]) / (many - few)) if many > few else 0.0
    return max(0.0, seconds[few] - few * slope), slope


def _without_decisions_s(one: PolicyTime, quiet: PolicySeconds) -> float:
    return one.iterations * quiet.observing_s(1) + one.turns * quiet.turning_s(1)


def _line(times: Sequence[PolicyTime]) -> tuple[float, float]:
    """Base and slope, neither negative: medians over policies, the slope over those timed twice."""
    by_name: dict[str, list[PolicyTime]] = {}
    for one in times:
        by_name.setdefault(one.name, []).append(one)
    pairs = [sorted(each, key=lambda one: one.tokens) for each in by_name.values()]
    per_token_s = _median(
        (each[-1].decision_s - each[0].decision_s) / (each[-1].tokens - each[0].tokens)
        for each in pairs
        if each[-1].tokens > each[0].tokens
    )
    per_token_s = max(0.0, per_token_s)
    base_s = _median(one.decision_s - per_token_s * one.tokens for one in times)
    return max(0.0, base_s), per_token_s


def _median(values: Iterable[float]) -> float:
    known = list(values)
    return float(np.median(known)) if known else 0.0
