"""Where a plan's figures come from: inputs and versions, assumed numbers, and cautions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from arborsim.core.documents import file_digest
from arborsim.core.errors import UsageError
from arborsim.core.geometry import UNBOUNDED
from arborsim.core.installed import in_words, versions
from arborsim.core.units import UNITS, measured, quantity
from arborsim.machine.basis import bases
from arborsim.machine.cost import CostModel
from arborsim.machine.fidelity import bases_text
from arborsim.machine.machine import ServingOptions
from arborsim.machine.numbers import assumed_numbers as profile_numbers
from arborsim.machine.price import Price
from arborsim.machine.profile import HardwareProfile
from arborsim.machine.serving import ServingEngine
from arborsim.machine.weights import weights_type
from arborsim.policies.registry import values_of
from arborsim.products.plan.demands import Facts, MixDemands
from arborsim.products.plan.results import INFEASIBLE, CandidateResult
from arborsim.products.plan.statistics import Estimate, Solved, solved_share
from arborsim.products.plan.workload import SERVING, USUAL_BUDGETS, Candidate, MixEntry, Workload
from arborsim.trace.reader import open_trace

_SAME_LENGTH = 0.01  # answers are of one length up to this share
#: Values of a distribution that say nothing.
_SILENT = {"parallel": 0, "rewards": "none", "pruned": [0.0], "finished": [0.0]}


def settings_of(workload: Workload) -> dict[str, str]:
    """Everything that determines the result, as text."""
    prices, geometry, serving = workload.prices, workload.geometry, workload.serving
    found = {
        "model geometry": geometry.name,
        "weights": weights_type(geometry),
        "KV bytes per token": f"{geometry.kv_bytes_per_token:,}",
        "searches per run": f"{workload.searches}, the first {workload.warm_up} not measured",
        "seeds": ", ".join(map(str, workload.seeds())),
        "loads tried": f"{100 * workload.resolution:g}% apart",
        "serving": _listed({name: getattr(serving, name) for name in SERVING}),
        "tokens per page": str(workload.page_tokens),
        "tree attention": "on" if workload.tree_attention else "off",
        "prices": f"{prices.currency}, {prices.date}: {prices.source}",
        "versions": in_words(versions("numpy", "pyarrow", "scipy")),
    }
    for entry in workload.mix:
        found[f"mix: {entry.name}"] = f"weight {entry.weight:g}; {_source(entry)}"
    for made in workload.calibrations:
        found[f"calibration {Path(made.source).name}"] = (
            f"{made.kind} of {', '.join(made.policies)}, measured on {made.model} ({made.layers} "
            f"layers, seed {made.seed}), sha256 {file_digest(Path(made.source))}"
        )
    for choice in workload.policies:
        found[f"policy {choice.name}"] = _listed(values_of(choice.policy)) or "no parameters"
    return found


def bases_of_seconds(workload: Workload) -> dict[str, str]:
    """The bases of the terms of time, for each machine that can price the model."""
    found = {}
    for hardware in workload.hardware:
        cost = CostModel(hardware.profile, workload.geometry)
        options = replace(workload.serving, tensor_parallel=hardware.gpus)
        try:
            found[f"seconds on {hardware.name}"] = bases_text(bases(Price(cost, options)))
        except UsageError:  # a model that cannot be served there: its candidates say why
            continue
    return found


def _listed(values: Mapping[str, object]) -> str:
    """``"watermark 0.01, nvme_bytes_per_s 6.00 GB/s"``: names with values in their units."""
    return ", ".join(f"{name} {_text(value, name)}" for name, value in values.items())


def _text(value: object, name: str = "") -> str:
    """A setting as a TOML file would have it: no quotes, digits only where they matter."""
    if name == "max_searches" and value == ServingOptions.max_searches:
        return "as many as fit"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_text, value))}]"
    if not isinstance(value, int | float):
        return str(value)
    kind, per, _ = measured(name).partition("/s")
    if kind in UNITS:
        return quantity(kind, value) + per
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def _source(entry: MixEntry) -> str:
    tokens, made = entry.shared_prompt_tokens, entry.source
    shared = f"; {tokens} prompt tokens in common" if tokens else ""
    if not isinstance(made, Path):
        said = {k: v for k, v in made.spec.parameters().items() if v not in (None, _SILENT.get(k))}
        drawn = f"{made.searches} searches generated from seed {made.seed}"
        return f"{drawn}: {_listed(said)}{shared}"
    info = open_trace(made).info
    return (
        f"{made.name}: {info.task}, {info.search}, recorded on {info.model} (seed {info.seed}), "
        f"sha256 {file_digest(made)}{shared}"
    )


def assumed_numbers(workload: Workload) -> tuple[str, ...]:
    """Numbers of the profiles that are assumed, as `arborsim hardware` shows."""
    profiles = {hardware.profile.name: hardware.profile for hardware in workload.hardware}
    return tuple(f"{name}: {each}" for name, p in profiles.items() for each in profile_numbers(p))


#: Beyond this share of a search's seconds an assumed number is named.
_NOTED = 0.01
#: Assumed numbers that are no rates, shares or seconds.
_SIZES = ("reserve_share", "all_reduce_gpus")


def rests_on_assumed(workload: Workload, candidate: Candidate, found: MixDemands) -> str:
    """Which assumed numbers move a candidate's seconds by more than 1%, and how far; "" if none.

    The search of median length is served by itself on the candidate's machine, with each of them
    at half and at twice its value, and with all of them together.
    """
    hardware = candidate.hardware
    options = replace(workload.serving, tensor_parallel=hardware.gpus)
    demand = sorted(found.demands, key=lambda each: each.iterations)[len(found.demands) // 2]

    def seconds(names: Sequence[str], factor: float) -> float:
        """Seconds of the search where each of these takes `factor` times as long."""
        own = {name: _slower(hardware.profile, name, factor) for name in names}
        profile = replace(hardware.profile, **own)
        engine = ServingEngine([demand], profile, workload.geometry, options, kv_bytes=UNBOUNDED)
        return engine.alone[0].seconds

    base_s = seconds((), 1.0)
    moves = {
        name: seconds((name,), 2.0) / base_s - 1
        for name in hardware.profile.numbers()
        if hardware.profile.is_assumed(name)
        if name not in _SIZES and not name.endswith("_bytes")
    }
    named = [name for name in sorted(moves, key=lambda name: -moves[name]) if moves[name] > _NOTED]
    if not named:
        return ""
    low_s, high_s = (seconds(named, factor) for factor in (0.5, 2.0))
    each = ", ".join(f"{name} ({moves[name]:+.0%} where it costs twice as much)" for name in named)
    return (
        f"The figures of {candidate.policy.name} on {hardware.name} rest on assumed numbers of its "
        f"profile: {each}. From half to twice of what these cost, a search alone takes "
        f"{quantity('seconds', low_s)} to {quantity('seconds', high_s)}, and not "
        f"{quantity('seconds', base_s)}; measure them, or give them in a profile of your own."
    )


def _slower(profile: HardwareProfile, name: str, factor: float) -> Any:
    """A number of a profile, or a curve, at which what it stands for takes `factor` as long."""
    value = getattr(profile, name)
    each = value if isinstance(value, tuple) else (value,)
    most = math.inf if name.endswith("_per_s") else 1.0  # shares
    seconds = name.endswith("_s") and not name.endswith("_per_s")
    found = tuple(x * factor if seconds else min(most, x / factor) for x in each)
    return found if isinstance(value, tuple) else found[0]


def cautions(
    workload: Workload,
    results: Sequence[CandidateResult],
    solved: Sequence[Solved] = (),
    answers_of: str = "",
) -> tuple[str, ...]:
    """Notes on the figures, each one sentence.

    `solved` is what is known of how many searches have a correct answer, by entry of the mix;
    `answers_of` is what live runs counted answers of.
    """
    found = []
    infeasible = [each for each in results if each.status == INFEASIBLE]
    if infeasible:
        names = ", ".join(dict.fromkeys(f"{each.policy} at {each.budget}" for each in infeasible))
        found.append(
            f"{len(infeasible)} of {len(results)} candidates cannot be served under their policy "
            f"and budget: {names}."
        )
    offloads = any(candidate.offloads for candidate in workload.candidates())
    if offloads and any(hardware.gpus > 1 for hardware in workload.hardware):
        found.append(
            "Policies that use DDR decided what to fetch on one GPU of each kind; where several "
            "share a model, the same bytes cross PCIe at their speed."
        )
    engines = [each.profile.engine for each in workload.hardware]
    found += dict.fromkeys(each.observed for each in engines if each is not None and each.observed)
    for entry in workload.mix:
        if isinstance(entry.source, Path):
            found += _recorded(entry, entry.source, workload)
    if workload.answers is not None:
        found.append(
            f"Answers were counted live on other problems ({workload.answers.text}) and stand for "
            "those of this workload, which were not measured."
        )
    if short := _short_runs(workload, results):
        found.append(short)
    # Where the workload itself names these problems, that was said.
    other = answers_of if workload.answers is None else ""
    shares = _solved_shares(workload, results, solved, other)
    return (*found, *_without_effect(workload), *shares)


def _recorded(entry: MixEntry, source: Path, workload: Workload) -> Iterator[str]:
    """The model that a trace was recorded on, and what of it plans do not model."""
    info = open_trace(source).info
    model = info.geometry.name
    if model != workload.geometry.name:
        yield (
            f"{entry.name} was recorded on {model} and is charged as "
            f"{workload.geometry.name}: lengths, trees and decisions are the recorded ones."
        )
    if not info.prefix_block_tokens:
        return
    if not entry.in_order:
        stated = f"the first {entry.shared_prompt_tokens:,} tokens, as stated"
        yield f"{entry.name} is a log with prefix blocks; instead of these, prompts share {stated}."
    elif workload.serving.prefix_sharing:
        yield (
            f"Requests of {entry.name} arrive in recorded order and share their blocks of "
            f"{info.prefix_block_tokens} tokens, which stay in HBM until others need the room. A "
            "run begins without any: longer runs find more. Blocks are held whole, whatever the "
            "policy of a request that uses them drops."
        )


def _short_runs(workload: Workload, results: Sequence[CandidateResult]) -> str:
    """How uncertain largest loads are that were sought in larger steps than usual; else ""."""
    if workload.resolution <= Workload.resolution:
        return ""
    measured = workload.searches - workload.warm_up
    rank, runs = workload.target.strictest, workload.runs
    off = 1.96 * math.sqrt(rank * (100 - rank) / measured)  # of a binomial count, in percent
    text = (
        f"Largest loads were tried {100 * workload.resolution:g}% apart, in "
        f"{runs} run{'s' * (runs > 1)} of {workload.searches} searches ({measured} measured): "
        f"{rank:g}% of so few may be {rank - off:.0f}% to {min(rank + off, 100):.0f}% of many"
    )
    loads = [each.largest_by_seed for each in results if len(each.largest_by_seed) > 1]
    if loads:
        apart = max(max(each) / min(each) - 1 for each in loads)
        text += f", and the runs' own largest loads lie up to {apart:.0%} apart"
    return f"{text}. More runs, more searches and a smaller resolution tell more."


def _without_effect(workload: Workload) -> Iterator[str]:
    """Settings that differ from their defaults and change nothing, each with its reason."""
    serving, usual = workload.serving, ServingOptions()
    geometry, most = workload.geometry, max(each.gpus for each in workload.hardware)
    stated = any(entry.shared_prompt_tokens for entry in workload.mix)
    off = "" if serving.prefix_sharing else "prefix_sharing is off"
    shares = stated or any(entry.in_order for entry in workload.mix)
    none = (
        "no searches share a prefix, because no entry of the mix states shared_prompt_tokens or "
        "has prefix blocks"
    )
    unshared = off or ("" if shares else none)
    uncopied = unshared or ("" if serving.prefix_host_bytes else "prefix_host_bytes is 0")
    dense = "" if geometry.experts else f"{geometry.name} has no experts"
    alone = "" if most > 1 else "no candidate has several GPUs"
    if stated and off:
        yield f"shared_prompt_tokens has no effect: {off}."
    for name, why in (
        ("prefix_host_bytes", unshared),
        ("prefix_block_tokens", unshared),
        ("prefix_load_tokens", uncopied),
        ("expert_parallel", dense or alone),
    ):
        if why and getattr(serving, name) != getattr(usual, name):
            yield f"{name} has no effect: {why}."
    candidates = workload.candidates()
    if workload.budgets != USUAL_BUDGETS and all(each.budget is None for each in candidates):
        yield "budgets has no effect: no policy uses one."
    if workload.recalls != ("stage",) and not any(each.offloads for each in candidates):
        yield "recalls has no effect: no policy places tokens in DDR."


def _solved_shares(
    workload: Workload,
    results: Sequence[CandidateResult],
    solved: Sequence[Solved],
    answers_of: str,
) -> Iterator[str]:
    """Sentences about the shares of right answers that costs per solved search rest on."""
    priced = [each for each in results if each.at_largest and each.at_largest.cost_per_solved]
    live = {
        (each.policy, each.budget): each.quality.accuracy
        for each in priced
        if each.quality is not None and each.quality.accuracy is not None
    }
    share = solved_share([entry.weight for entry in workload.mix], solved) if solved else None
    if share is not None and any((each.policy, each.budget) not in live for each in priced):
        yield f"Costs per solved search rest on {_origin(workload, solved, share)}."
    if live:
        shares = ", ".join(
            f"{policy if budget == '-' else f'{policy} at {budget}'} {_share_text(share)} of "
            f"{share.n}"
            for (policy, budget), share in live.items()
        )
        of = f" of {answers_of}, not of this workload's searches" if answers_of else ""
        yield f"Costs per solved search rest on right answers of live runs{of}: {shares}."


def _origin(workload: Workload, solved: Sequence[Solved], share: Estimate) -> str:
    """The share of the mix that is solved, and which of its entries state or record theirs."""
    if all(each.stated is None for each in solved):
        return (
            f"{_share_text(share)} of {share.n} distinct searches of the mix having a correct "
            "answer"
        )
    if len(solved) == 1:
        return f"a solve rate of {share.value:.1%} that is stated, not measured"
    parts = ", ".join(
        f"{each.right} of {each.judged} recorded ({entry.name})"
        if each.stated is None
        else f"{each.stated:.1%} stated ({entry.name})"
        for entry, each in zip(workload.mix, solved, strict=True)
    )
    whole = f"{share.value:.1%}" if share.is_stated else _share_text(share)
    return f"a solve rate of {whole} of the mix: {parts}; what is stated was not measured"


def _share_text(share: Estimate) -> str:
    return f"{share.value:.1%} ({share.low:.1%} to {share.high:.1%} at 95% confidence)"


def short_prompts(workload: Workload, facts: Sequence[Facts]) -> Iterator[str]:
    """Notes on entries with prompts shorter than what the entry's prompts should share."""
    for number, entry in enumerate(workload.mix):
        shared = entry.shared_prompt_tokens
        if not shared or not workload.serving.prefix_sharing:
            continue
        lengths = [each.prompt_tokens for each in facts if each.entry == number]
        short = sum(length < shared for length in lengths)
        if short:
            yield (
                f"{entry.name}: {short:,} of {len(lengths):,} distinct searches have prompts "
                f"shorter than shared_prompt_tokens = {shared:,}: each shares its whole prompt, "
                "and that with prompts of the same length only."
            )


def lengthened(workload: Workload, found: Sequence[CandidateResult]) -> Iterator[str]:
    """Which candidates were served in longer runs, and of which no limit was seen in these."""
    longer = [each for each in found if each.searches > workload.searches and not each.is_open]
    if longer:
        most = max(each.searches for each in longer)
        yield (
            f"Runs of {workload.searches:,} searches saw no limit of {_several(longer)}: they were "
            f"served in longer ones of the same searches, of up to {most:,}."
        )
    still = [each for each in found if each.is_open]
    if still:
        most = max(each.searches for each in still)
        yield (
            f"No limit was seen of {_several(still)}, in runs of up to {most:,} searches: the load "
            "that they carried is no bound in either direction, and nothing is said of their "
            f"costs. More searches per run (searches = {2 * most}) can tell."
        )


def longer_answers(
    found: Sequence[CandidateResult], growth: Mapping[tuple[str, str], float]
) -> Iterator[str]:
    """How much longer answers are under the policies, which their seconds and costs include."""
    named = {
        f"{each.policy} at {each.budget}": f"{factor - 1:+.0%}"
        for each in found
        if abs((factor := growth.get((each.policy, each.budget), 1.0)) - 1) >= _SAME_LENGTH
    }
    if named:
        each = ", ".join(f"{name} {text}" for name, text in named.items())
        yield f"Answers are longer or shorter than under full retention, as counted: {each} tokens."


def _several(found: Sequence[CandidateResult]) -> str:
    """Their names, of many the first ones."""
    named = [each.name for each in found[:3]]
    more = len(found) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")
