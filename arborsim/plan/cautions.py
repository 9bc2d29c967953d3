"""What to know about a plan's figures: its notes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from arborsim.plan.demands import Variant, drawn
from arborsim.plan.results import INFEASIBLE, CandidateResult
from arborsim.plan.statistics import Estimate
from arborsim.plan.workload import MixEntry, Workload
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import Kind


def cautions(
    workload: Workload,
    chosen: Sequence[Variant],
    results: Sequence[CandidateResult],
    solved: Estimate | None = None,
) -> tuple[str, ...]:
    """Notes on the figures, each one sentence.

    Parameters
    ----------
    workload : Workload
    chosen : sequence of Variant
        The workload's.
    results : sequence of CandidateResult
    solved : Estimate or None
        Share of the mix's searches with a correct answer, as recorded.
    """
    found = []
    infeasible = [each for each in results if each.status == INFEASIBLE]
    if infeasible:
        names = ", ".join(dict.fromkeys(f"{each.policy} at {each.budget}" for each in infeasible))
        found.append(
            f"{len(infeasible)} of {len(results)} candidates cannot be served under their policy "
            f"and budget: {names}."
        )
    if any(variant.offloads for variant in chosen) and any(w.gpus > 1 for w in workload.hardware):
        found.append(
            "Policies that use DDR decided what to fetch on one GPU of each kind; where several "
            "share a model, the same bytes cross PCIe at their speed."
        )
    for entry in workload.mix:
        if isinstance(entry.source, Path):
            found += _recorded(entry, entry.source, workload)
    return (*found, *_without_effect(workload), *_solved_shares(results, solved))


def _recorded(entry: MixEntry, source: Path, workload: Workload) -> Iterator[str]:
    """What a trace was recorded on, and what of it plans do not model."""
    info = TraceReader(source).info
    model = info.geometry.name
    if model != workload.geometry.name:
        yield (
            f"{entry.name} was recorded on {model} and is charged as "
            f"{workload.geometry.name}: lengths, trees and decisions are the recorded ones."
        )
    if info.extra.get("prefix_block_tokens"):
        shared = entry.shared_prompt_tokens if workload.serving.prefix_sharing else 0
        beyond = f" beyond the first {shared:,} tokens" if shared else ""
        yield (
            f"{entry.name} is a log whose requests have prefix blocks in common, which plans do "
            f"not model: prompts are computed whole{beyond}."
        )


def _without_effect(workload: Workload) -> Iterator[str]:
    """Settings about shared prefixes that change nothing."""
    serving = workload.serving
    stated = any(entry.shared_prompt_tokens for entry in workload.mix)
    if stated and not serving.prefix_sharing:
        yield "shared_prompt_tokens has no effect: prefix_sharing is off."
    if not serving.prefix_host_bytes:
        return
    if not serving.prefix_sharing:
        yield "prefix_host_bytes has no effect: prefix_sharing is off."
    elif not stated:
        yield (
            "prefix_host_bytes has no effect: no searches share a prefix, because no entry of the "
            "mix states shared_prompt_tokens."
        )


def _solved_shares(results: Sequence[CandidateResult], solved: Estimate | None) -> Iterator[str]:
    """What costs per solved search rest on."""
    priced = [each for each in results if each.at_largest and each.at_largest.cost_per_solved]
    live = {
        (each.policy, each.budget): each.quality.accuracy
        for each in priced
        if each.quality is not None and each.quality.accuracy is not None
    }
    if solved is not None and any((each.policy, each.budget) not in live for each in priced):
        yield (
            f"Costs per solved search rest on {_share_text(solved)} of {solved.n} distinct "
            "searches of the mix having a correct answer."
        )
    for (policy, budget), share in live.items():
        name = policy if budget == "-" else f"{policy} at {budget}"
        yield (
            f"Costs per solved search of {name} rest on {_share_text(share)} of {share.n} "
            "problems of live runs having a correct answer."
        )


def _share_text(share: Estimate) -> str:
    return f"{share.value:.1%} ({share.low:.1%} to {share.high:.1%} at 95% confidence)"


def short_prompts(workload: Workload, traces: Sequence[Path]) -> tuple[str, ...]:
    """Notes on entries with prompts shorter than what all of the entry's are said to share.

    Parameters
    ----------
    workload : Workload
    traces : sequence of Path
        One per entry of the mix (`Workload.write_traces`).
    """
    found = []
    for number, (entry, trace) in enumerate(zip(workload.mix, traces, strict=True)):
        shared = entry.shared_prompt_tokens
        if not shared or not workload.serving.prefix_sharing:
            continue
        reader = TraceReader(trace)
        lengths = [_prompt(reader, episode) for of, episode in drawn(workload) if of == number]
        short = sum(length < shared for length in lengths)
        if short:
            found.append(
                f"{entry.name}: {short:,} of {len(lengths):,} distinct searches have prompts "
                f"shorter than shared_prompt_tokens = {shared:,}: each shares its whole prompt, "
                "and that with prompts of the same length only."
            )
    return tuple(found)


def _prompt(reader: TraceReader, episode: int) -> int:
    """Tokens of an episode's prompt."""
    kinds = reader.table(episode, ["kind"]).column("kind").cast(pa.string())
    return int(pc.sum(pc.equal(kinds, Kind.PREFILL.label)).as_py())
