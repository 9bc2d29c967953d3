"""What policies cost in live searches: more than their decisions alone.

A live search takes signals off the model, keeps scores up to date, lets the controller make a plan
and moves tensors.  For a policy that was timed, the profile says what an iteration, a sequence and
a decision take (`seconds_of`).  For one that was not, all of it is charged per decision, as a
median over the others; what attention takes longer where its rows are wanted is told per layer of
an iteration (`fit_policies`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from arborsim.hardware.policy_seconds import PolicySeconds


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
    iterations, decisions : int
    decode_s, policy_s : float
        Of all iterations.
    full_decode_s, full_policy_s : float
        The same under full retention.
    quiet : tuple of (int, float)
        Searches whose budget holds everything: sequences that decode together, and the policy's
        seconds per iteration.
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
    quiet: tuple[tuple[int, float], ...] = ()

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
    few, many = min(times[0].quiet), max(times[0].quiet)
    lane_s = max(0.0, (many[1] - few[1]) / (many[0] - few[0])) if many[0] > few[0] else 0.0
    iteration_s = max(0.0, few[1] - few[0] * lane_s)
    quiet_s = iteration_s + lane_s
    taken = sorted(
        (one.tokens, max(0.0, one.policy_s - one.iterations * quiet_s) / one.decisions)
        for one in times
        if one.decides_often
    )
    if not taken:
        return PolicySeconds(iteration_s, lane_s, *alone)
    (fewer, less_s), (more, more_s) = taken[0], taken[-1]
    slope_s = max(0.0, (more_s - less_s) / (more - fewer)) if more > fewer else 0.0
    base_s = float(np.mean([s - slope_s * tokens for tokens, s in taken]))
    return PolicySeconds(iteration_s, lane_s, max(0.0, base_s), slope_s)


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
