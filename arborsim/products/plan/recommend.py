"""Which candidate to take, and why, in plain words.

A candidate may be recommended if it meets the target and its quality is known to be good enough:
it keeps every token exactly, or it reaches the attention kept, or the accuracy of live runs, that
the user asks for.  Of these the cheapest is taken; replay cannot say what dropping tokens does to
answers, so a candidate that drops some is never recommended on its price alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arborsim.machine.fidelity import share_text
from arborsim.products.plan.answer import answer, cost_at, solved_known
from arborsim.products.plan.costs import (
    assumed_factors,
    machines_for,
    middle_cost,
    middle_solved,
    order_cost,
    order_solved,
    told_apart,
)
from arborsim.products.plan.results import (
    MET,
    MISSED,
    UNFIT,
    Alone,
    CandidateResult,
    PlanResult,
    Recommendation,
)
from arborsim.products.plan.statistics import mean_interval
from arborsim.products.plan.target import KINDS
from arborsim.products.plan.words import limits_of, load_of, named


def none_met(plan: PlanResult) -> str:
    """By how much the best one misses the target, and what would help: three short lines."""
    if (nearest := _nearest(plan)) is not None:
        best, alone = nearest
        return (
            f"No candidate meets the target: {limits_of(plan)}. "
            f"Nearest: {best.name}, {_missed_by(alone, best.reason, plan)}."
        )
    if not plan.candidates:
        return "No candidate was finished."
    unfit = [each for each in plan.candidates if each.status == UNFIT]
    first = (unfit or plan.candidates)[0]
    return f"No candidate can serve these searches; {first.name}: {first.reason}"


def _nearest(plan: PlanResult) -> tuple[CandidateResult, Alone] | None:
    """The candidate that misses the target by the least, if one does."""
    missed = [(each, each.alone) for each in plan.candidates if each.status == MISSED if each.alone]
    return min(missed, key=lambda pair: (_excess(pair[1], plan), pair[0].number), default=None)


def _missed_by(alone: Alone, reason: str, plan: PlanResult) -> str:
    """How many times the limits even a search alone takes, and which limits it would meet."""
    over, enough = [], []
    for limit in plan.target.limits:
        kind = KINDS[limit.kind]
        value = kind.per_s * getattr(alone.at_percentiles, limit.kind)
        if (times := value / kind.per_s / limit.seconds) > 1:
            over.append(f"{value:.3g} {kind.unit} {kind.per} ({times:.3g}x)")
            enough.append(f'{limit.kind} = "{_up(value)} {kind.unit}"')
    if not over:
        return f"of which {reason}. Relax the target or take faster GPUs"
    few = reason.partition("; few distinct")
    luck = f" ({''.join(few[1:]).removeprefix('; ')})" if few[1] else ""
    relaxed = f"Relax to {', '.join(enough)}, or take faster or more GPUs"
    return f"alone {', '.join(over)}{luck}. {relaxed}"


def _excess(alone: Alone, plan: PlanResult) -> float:
    limits = plan.target.limits
    return max(float(getattr(alone.at_percentiles, x.kind)) / x.seconds for x in limits)


def _up(value: float) -> str:
    """Two digits, rounded up."""
    if value <= 0:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{math.ceil(value / unit) * unit:g}"


_SAME = 0.005  # costs closer than this are about the same
_MOST_ALIKE = 4  # that are named
_FEWEST_RUNS = 3  # that tell something about their spread
_MANY_PREEMPTIONS = 100  # per 1,000 searches


@dataclass(frozen=True)
class Demanded:
    """The quality that the user asks for: the least shares; None asks for nothing."""

    attention_kept: float | None = None
    accuracy: float | None = None

    @property
    def anything(self) -> bool:
        return self.attention_kept is not None or self.accuracy is not None

    def allows(self, candidate: CandidateResult) -> bool:
        """Whether the candidate's quality is known to suffice."""
        quality = candidate.quality
        if quality is None:
            return False
        kept, accuracy = quality.attention_kept, quality.accuracy
        if accuracy is not None and self.accuracy is not None and accuracy.value < self.accuracy:
            return False
        if not self.anything or quality.exact:
            return quality.exact
        if self.attention_kept is not None and (kept is None or kept < self.attention_kept):
            return False
        return self.accuracy is None or accuracy is not None


def recommend(plan: PlanResult, demanded: Demanded) -> Recommendation:
    """The recommendation of a plan whose other fields are filled in."""
    met = sorted(plan.met(), key=_rank)
    if not met:
        return Recommendation(None, none_met(plan), unknown=_unknown(plan, None))
    good = [each for each in met if demanded.allows(each)]
    wanted = good or met
    if solved_known(wanted):  # answers that are wrong are paid for as well
        wanted = sorted(wanted, key=lambda each: (order_solved(each), *_rank(each)))
    best, *others = wanted
    cheaper = next((each for each in met if each not in good), None) if good else None
    alternative = others[0] if others else cheaper
    sentences, telling = [_why(best, good, met, demanded, plan)], list[str]()
    if not good:
        telling += sentences
    if alternative is not None and alternative is not cheaper:
        sentences.append(f"The nearest alternative is {_compared(alternative, best, plan)}.")
        if _is_close(alternative, best):
            telling.append(sentences[-1])
    if cheaper is not None and _rank(cheaper)[0] < (1 - _SAME) * _rank(best)[0]:
        sentences.append(
            f"Of those whose quality {_doubt(cheaper, demanded)}, the cheapest is "
            f"{_compared(cheaper, best, plan)}."
        )
        telling.append(sentences[-1])
    shown = [best] if alternative is None else [best, alternative]
    rests_on = [] if best.evidence is None else [best.evidence.sentence()]
    alike = [each for each in met if each is not best and not told_apart(best, each)]
    doubts = [*_assumed(met), *_not_distinguished(alike)]
    sentences += [*_filled(best, plan), *rests_on, *doubts, *_included(shown)]
    return Recommendation(
        best.number,
        " ".join(sentences),
        None if alternative is None else alternative.number,
        _unknown(plan, best),
        answer(best, alternative, plan),
        (*telling, *_not_distinguished(alike), *_assumed([best]), *rests_on),
    )


def _rank(candidate: CandidateResult) -> tuple[float, float, int]:
    """The order of costs, then of GPUs per load; candidates without a price come last."""
    fleet = candidate.fleet
    assert candidate.largest is not None
    gpus = fleet.gpus if fleet is not None else candidate.gpus / candidate.largest
    return order_cost(candidate), gpus, candidate.number


def _doubt(row: CandidateResult, demanded: Demanded) -> str:
    """Why a candidate's quality will not do: it was counted and falls short, or is not known."""
    share = row.quality.accuracy if row.quality is not None else None
    if share is not None and demanded.accuracy is not None and share.value < demanded.accuracy:
        return "does not suffice"
    return "is not known to suffice"


def _filled(best: CandidateResult, plan: PlanResult) -> list[str]:
    """Sentences about the largest load: its cost, and places that are lost."""
    point, found = best.at_largest, []
    assert point is not None
    if best.fleet is not None and point.cost_per_1000 is not None:
        found.append(f"One machine with all that it carries: {cost_at(point, best, plan)}.")
    if point.preemptions_per_1000 > _MANY_PREEMPTIONS:
        found.append(
            f"Places are lost there {point.preemptions_per_1000:,.0f} times per 1,000 searches "
            "(preemption), and those searches wait."
        )
    return found


def _why(
    best: CandidateResult,
    good: Sequence[CandidateResult],
    met: Sequence[CandidateResult],
    demanded: Demanded,
    plan: PlanResult,
) -> str:
    all_kept, name = not demanded.anything, named(best)
    one = "keeps every token" if all_kept else "reaches the quality that was asked for"
    first = "the one with the fewest GPUs"
    if math.isfinite(order_cost(best)):
        first = f"{'as far as runs that saw no limit can tell ' * best.is_open}the cheapest"
    several = "keep every token exactly" if all_kept else "reach the quality that was asked for"
    if not good:
        return (
            f"{name} is {first} of {len(met)} candidates that meet the target, but none of "
            f"them is known to be good enough: none {one}."
        )
    candidates = len(plan.candidates)
    if len(good) == 1:
        return f"{name} is the only candidate of {candidates} that meets the target and {one}."
    return (
        f"{name} is {first} of the {len(good)} candidates (of {candidates}) that meet the "
        f"target and {several}."
    )


def _compared(other: CandidateResult, best: CandidateResult, plan: PlanResult) -> str:
    """Another candidate, with its cost against the best one's."""
    solved = solved_known([other, best])
    here, there = (middle_solved(each) if solved else middle_cost(each) for each in (best, other))
    assert other.at_largest is not None
    assert other.largest is not None
    if not (math.isfinite(here) and math.isfinite(there)) or not here:
        return f"{named(other)}, which serves {load_of(other.largest, plan)}"
    point = other.fleet or other.at_largest
    text, change = f"{named(other)} at {cost_at(point, other, plan, solved)}", there / here - 1
    left_open = _left_open(other, best)
    if abs(change) < _SAME:
        return f"{text}, about the same{left_open}"
    words = f"{abs(change):.0%} {'more' if change > 0 else 'less'}"
    return f"{text}, {words}{left_open}{_against_error(other, best, abs(change), bool(left_open))}"


def _is_close(other: CandidateResult, best: CandidateResult) -> bool:
    """Whether runs, or errors of seconds, leave open which of two costs less."""
    here, there = middle_cost(best), middle_cost(other)
    if not (0 < here < math.inf and there < math.inf):
        return False
    is_open = bool(_left_open(other, best))
    return is_open or bool(_against_error(other, best, abs(there / here - 1), is_open))


def _against_error(a: CandidateResult, b: CandidateResult, change: float, is_open: bool) -> str:
    """A remark on a difference in cost where errors of seconds may explain it; else "".

    Two candidates on the same GPUs and engine have their errors in common, so that ratios are
    safer than costs.  Of others the larger error counts.
    """
    if a.evidence is None or b.evidence is None:
        return ""
    if a.evidence.machine == b.evidence.machine:
        if is_open or a.error is None or change >= a.error:
            return ""
        return (
            f" (less than the error of seconds, {share_text(a.error)}, but that is common to both: "
            "same GPU, engine and width)"
        )
    unknown = dict.fromkeys(each.machine for each in (a, b) if each.error is None)
    if unknown:
        names = " and ".join(unknown)
        return f" (how far off seconds are on {names} is not known, so the difference is uncertain)"
    error = max(each.error for each in (a, b) if each.error is not None)
    if change >= error:
        return ""
    return f" (less than the error of seconds, {share_text(error)}: no difference)"


def _included(shown: Sequence[CandidateResult]) -> list[str]:
    """How much the ranges of costs were widened; nothing where there are none."""
    errors = {
        each.machine: "nothing" if each.error is None else share_text(each.error)
        for each in shown
        if each.price_per_hour is not None and each.evidence is not None and not each.is_open
    }
    if not errors:
        return []
    (first, *others) = dict.fromkeys(errors.values())
    if not others and first == "nothing":
        return ["The error of simulated seconds is not known: costs include nothing for it."]
    each = " and ".join(f"{error} on {name}" for name, error in errors.items())
    whole = "; at the stated load it counts by whole machines" if shown[0].fleet else ""
    if not others:
        return [f"Costs include {first} for the error of simulated seconds{whole}."]
    return [f"Costs include, for the error of simulated seconds, {each}{whole}."]


def _assumed(met: Sequence[CandidateResult]) -> list[str]:
    """A sentence on policies whose seconds in the engine are assumed, with the range of costs."""
    found = [(each, *assumed_factors(each)) for each in met]
    ranges = {
        f"{each.policy} on {each.machine}": f"{low - 1:+.0%} to {high - 1:+.0%}"
        for each, low, high in found
        if high > 1
    }
    if not ranges:
        return []
    said = "; ".join(f"{name} {text}" for name, text in ranges.items())
    return [
        "No one has measured these policies in the engine, so what they add to a step is worked "
        f"out from their operations, and seconds may differ by {said}. Costs include that, and the "
        "order takes the most."
    ]


def _not_distinguished(alike: Sequence[CandidateResult]) -> list[str]:
    """A sentence on candidates whose costs overlap with those of the recommended one."""
    if not alike:
        return []
    named_ = ", ".join(map(named, alike[:_MOST_ALIKE]))
    more = f" and {len(alike) - _MOST_ALIKE} more" if len(alike) > _MOST_ALIKE else ""
    return [f"Not distinguished from it, as these ranges overlap: {named_}{more}."]


def _left_open(a: CandidateResult, b: CandidateResult) -> str:
    """A remark where the runs, seed by seed, leave open which one costs less; else "".

    That is told by the machines for the stated load that each run's own limit asks for, or without
    one by the interval of the differences of costs at these limits, which two runs are too few for.
    Runs that all agree leave nothing open.
    """
    if a.is_open or b.is_open or len(a.largest_by_seed) < 2:
        return ""
    if a.price_per_hour is None or b.price_per_hour is None:
        return ""
    prices = sum(a.price_per_hour), sum(b.price_per_hour)
    if a.fleet is not None and b.fleet is not None:
        if a.fleet.stated:
            return ""
        load = a.fleet.load
        more = [
            prices[0] * machines_for(load, mine) - prices[1] * machines_for(load, other)
            for mine, other in zip(a.largest_by_seed, b.largest_by_seed, strict=True)
        ]
        if not min(more) <= 0 <= max(more) or min(more) == max(more):
            return ""
        return (
            f", but the runs leave that open: by their own limits it takes {_counts(a, load)}, and "
            f"the recommended {_counts(b, load)}"
        )
    if len(a.largest_by_seed) < _FEWEST_RUNS or not all(prices):
        return ""
    loads = np.log(a.largest_by_seed) - np.log(b.largest_by_seed)
    difference = mean_interval(math.log(prices[0] / prices[1]) - loads)
    if not difference.low <= 0 <= difference.high or np.allclose(loads, loads[0]):
        return ""
    return ", which is within the spread of the runs: more of them would tell which one costs less"


def _counts(candidate: CandidateResult, load: float) -> str:
    """Machines that the runs, each by its own limit, ask for: ``"2 or 3 machines"``."""
    counts = sorted({machines_for(load, limit) for limit in candidate.largest_by_seed})
    least, most, between = counts[0], counts[-1], "or" if len(counts) == 2 else "to"
    text = f"{least}" if least == most else f"{least} {between} {most}"
    return f"{text} machine{'s' * (most != 1)}"


def _unknown(plan: PlanResult, best: CandidateResult | None) -> tuple[str, ...]:
    """Sentences about what the plan does not know."""
    found = []
    if best is None and (nearest := _nearest(plan)) is not None:
        rests_on = nearest[0].evidence
        found += [] if rests_on is None else [rests_on.sentence()]
    quality = best.quality if best else None
    rows = plan.candidates if best else ()  # what serves nothing raises no question of quality
    lossy = [each for each in rows if each.quality and not each.quality.exact]
    if quality is not None and not quality.exact and quality.accuracy is None:
        found.append(
            "How many answers this policy gets right is not known from replay: measure it with "
            "arborsim live, and give its log with --answers."
        )
    elif lossy and any(each.quality and each.quality.accuracy is None for each in lossy):
        found.append(
            "How many answers the policies that drop or round tokens, or leave unread some, get "
            "right is not known from replay; arborsim live measures it."
        )
    unknown = [q for each in lossy if (q := each.quality) and q.attention_kept is None]
    if any(quality.kept_note for quality in unknown):
        found.append(
            "Traces without queries and keys (--capture qkv) say nothing about policies that "
            "choose per layer or head: the share of the attention that these keep is not known."
        )
    if any(not quality.kept_note for quality in unknown):
        found.append(
            "Generated searches have no attention, so the share of it that a policy keeps is not "
            "known."
        )
    if plan.assumed:
        found.append(f"{len(plan.assumed)} numbers of the hardware profiles are assumed.")
    if best is not None and best.status == MET and best.price_per_hour is None:
        found.append(f"The price of {best.gpu} is not known.")
    return tuple(found)
