"""`--explain`: what the time of a replay or of a planned search consists of, term by term."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rich.console import Console

from arborsim.core.units import scale_for
from arborsim.machine.terms import Term, check_explained, total
from arborsim.play.results import EpisodeResult
from arborsim.products.plan.results import CandidateResult, LoadPoint
from arborsim.report.table import print_heading, print_list, terminal
from arborsim.report.words import plain


def explained(episodes: Sequence[EpisodeResult]) -> dict[tuple[str, str, str], tuple[Term, ...]]:
    """The terms of all searches of each trace, policy and budget, added up."""
    groups: dict[tuple[str, str, str], list[tuple[Term, ...]]] = {}
    for each in episodes:
        groups.setdefault((each.trace, each.policy, each.budget), []).append(each.terms)
    return {key: total(terms) for key, terms in groups.items()}


def print_terms(episodes: Sequence[EpisodeResult], console: Console | None = None) -> None:
    """Print a table per trace, policy and budget that adds up to its total time.

    The total is what the searches were measured to take. Raises `ResultError` if the terms leave
    more than 0.5% of it unexplained.
    """
    console = console or terminal()
    measured_s: dict[tuple[str, str, str], float] = defaultdict(float)
    for each in episodes:
        measured_s[each.trace, each.policy, each.budget] += each.measured.time.total_s
    for (trace, policy, budget), terms in explained(episodes).items():
        whole_s = measured_s[trace, policy, budget]
        whose = f"{policy} at budget {budget} on {trace}"
        check_explained(sum(term.seconds for term in terms), whole_s, whose)
        console.print()
        print_heading(console, policy, f"budget {budget}, {trace}")
        _print(console, terms, whole_s, replayed=True)
    for note in (
        "rests on: the kernels of a term, or the numbers of the profile or engine behind it: "
        "measured (or published), interpolated between measurements, extrapolated from them, "
        "fitted to published runs or kernels, or assumed; the worst of several counts.",
        "hidden: ran behind something else, or how long the link was in use; no part of the total.",
    ):
        console.print(note, style="dim", markup=False)


def print_explained(candidate: CandidateResult, console: Console | None = None) -> None:
    """Print how a candidate's memory comes about, and every term of a search's time."""
    console = console or terminal()
    console.print()
    console.print(plain(candidate.name), style="bold", markup=False)
    if pool := candidate.pool:
        copies = f" / {pool.copies:.4g} copies" if pool.copies != 1 else ""
        console.print(
            f"memory for keys and values: {pool.hbm_bytes / 1e9:.2f} GB - "
            f"{pool.reserve_bytes / 1e9:.2f} GB reserve - {pool.weight_bytes / 1e9:.2f} GB weights "
            f"- {pool.workspace_bytes / 1e9:.2f} GB workspace{copies} "
            f"= {pool.kv_bytes / 1e9:.2f} GB"
        )
    if candidate.alone is None:
        return
    alone = candidate.alone
    console.print(
        f"a search alone, on average: {alone.prompt_tokens:,.0f} prompt and "
        f"{alone.generated_tokens:,.0f} generated tokens, at most "
        f"{alone.peak_hbm_bytes / 1e9:.3f} GB of HBM and {alone.peak_ddr_bytes / 1e9:.3f} GB of DDR"
    )
    terms = [Term(name, seconds) for name, seconds in alone.terms_s.items() if seconds]
    _print(console, terms, alone.seconds)
    if candidate.at_largest is not None:
        console.print(_busy(candidate.at_largest))


def _busy(point: LoadPoint) -> str:
    """Where the machine's time goes at the largest load."""
    busy = point.busy
    parts = {
        "prefill": busy.prefill_s,
        "recomputing": busy.recompute_s,
        "decoding": busy.decode_s,
        "policies": busy.policy_s,
        "waiting for transfers": busy.exposed_s,
        "idle": max(0.0, point.total_s - busy.total_s),
    }
    shares = [f"{name} {100 * part / point.total_s:.1f}%" for name, part in parts.items() if part]
    return f"at the largest load the machine's time goes into {', '.join(shares)}"


def _print(console: Console, terms: Sequence[Term], whole_s: float, replayed: bool = False) -> None:
    """Names, seconds and their share of the whole. For a replay, what they rest on and hide."""
    unit = scale_for("seconds", [whole_s / 1000])  # small terms count, too
    rows = []
    for term in terms:
        share = f"{term.seconds / whole_s:.1%}" if whole_s else "-"
        hidden = unit.show(term.hidden_s) if term.hidden_s else ""
        seconds, basis = unit.show(term.seconds), term.basis.name.lower()
        rows.append((f"  {term.name}", seconds, share, basis, hidden))
    rows.append(("  total", unit.show(whole_s), "100.0%" if whole_s else "-", "", ""))
    heads = ["  term", unit.unit, "share"]
    heads += ["rests on", f"hidden {unit.unit}"] if replayed else []
    print_list(console, heads, [row[: len(heads)] for row in rows])
