"""Make ``reports/search/README.md`` from the searches that `benchmarks/searches.py` has stored.

    python benchmarks/searches_page.py

Accuracy with 95% Clopper-Pearson intervals, KV size and bytes against REBASE with paired bootstrap
intervals, the sweep of lambda_b, what policies add, and what follows, in words.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.searches_depth import Depths, section
from benchmarks.searches_figures import (
    FULL,
    Cell,
    Results,
    Searches,
    accuracy_text,
    difference_text,
)
from benchmarks.searches_findings import findings, limits

BANKS = {
    "verifier-all": "Noisy verifier, repeated thoughts go on",
    "verifier-distinct": "Noisy verifier, repeated thoughts are dead",
    "value-all": "The model's own value, repeated thoughts go on",
    "value-distinct": "The model's own value, repeated thoughts are dead",
    "chain": "Deeper: programs of 24 lines, 4 lines a thought",
    "chain-deep": "Deepest: programs of 40 lines, a line a thought",
}
SIGNALS = "signals"


def reward_text(searches: Searches) -> str:
    """What scores thoughts."""
    facts = searches.facts
    if facts["reward"] == "value":
        return "reward: the searched model's own probability of Y"
    return (
        f"reward: the exact verifier with noise of {facts['noise']:g} (standard deviation), dead "
        f"paths seen at {100 * facts['dead_penalty']:.0f}%"
    )


def table(searches: Searches) -> list[str]:
    """Accuracy and memory of all searches, against REBASE at the same width."""
    lines = [
        "| search | width | right / n | accuracy, % | against REBASE, points | KV size, tokens "
        "| KV less than REBASE | with the prompt | HBM peak less | held peak less | misses |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    widths = sorted({cell.width for cell in searches.groups})
    for width in widths:
        for cell in searches.cells(width=width):
            lines.append(_row(searches, cell))
    return lines


def _row(searches: Searches, cell: Cell) -> str:
    right, judged = searches.accuracy(cell)
    reference = searches.rebase(cell.width)
    against = ["-"] * 5
    if reference in searches.groups and cell != reference:
        figures = ("kv_tokens", "kv_tokens_with_prompt", "peak_hbm_kv_bytes", "peak_held_kv_bytes")
        ratios = [str(searches.ratio(cell, reference, figure)) for figure in figures]
        against = [difference_text(searches.paired(cell, reference)), *ratios]
    tokens = searches.groups[cell]["kv_tokens"].mean()
    missed = searches.missed(cell)
    return (
        f"| {cell.label} | {cell.width} | {right} / {judged} | {accuracy_text(right, judged)} "
        f"| {against[0]} | {tokens:,.0f} | {' | '.join(against[1:])} "
        f"| {f'{100 * missed:.1f}%' if missed else ''} |"
    )


def sweep_table(searches: Searches) -> list[str]:
    """ETS at every value that was tried, and which the paper's rule takes."""
    lines = [
        "| search | width | lambda_b | lambda_d | accuracy, % | against REBASE, points "
        "| KV less than REBASE | held byte-seconds less | misses | the paper's rule |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for width in searches.facts["widths"]:
        for algorithm in ("ets", "ets-kv"):
            chosen, tried = searches.chosen(algorithm, width)
            lines += [_swept(searches, cell, cell == chosen) for cell in tried]
            lines += [
                _swept(searches, cell, False)
                for cell in searches.cells(width=width, swept=True)
                if cell.algorithm == algorithm and math.isnan(cell.lambda_b)
            ]
    return lines


def _swept(searches: Searches, cell: Cell, taken: bool) -> str:
    reference = searches.rebase(cell.width)
    option, _, value = cell.swept.partition("=")
    lambda_d = "0" if cell.algorithm == "ets-kv" else value if option == "lambda_d" else "1"
    lambda_b = 1.0 if option == "lambda_d" else cell.lambda_b
    public = " (public code)" if option == "lambda_d" else ""
    missed = searches.missed(cell)
    return (
        f"| {cell.algorithm}{public} | {cell.width} | {lambda_b:g} | {lambda_d} "
        f"| {accuracy_text(*searches.accuracy(cell))} "
        f"| {difference_text(searches.paired(cell, reference))} "
        f"| {searches.ratio(cell, reference, 'kv_tokens')} "
        f"| {searches.ratio(cell, reference, 'held_kv_byte_s')} "
        f"| {f'{100 * missed:.1f}%' if missed else ''} | {'taken' if taken else ''} |"
    )


def policy_table(searches: Searches) -> list[str]:
    """What managing the cache adds to pruning the tree."""
    width = searches.facts["widths"][0]
    reference = searches.rebase(width)
    lines = [
        "| search | policy | budget | searches that fit | HBM peak less than REBASE, full "
        "| HBM byte-seconds less | destroyed tokens | recomputed tokens | attention kept |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    problems = len(searches.groups[reference])
    for algorithm in searches.facts["managed"]:
        for cell in searches.groups:
            if (cell.algorithm, cell.swept, cell.width) != (algorithm, "", width):
                continue
            rows = searches.groups[cell]
            kept = rows["attention_kept"].mean()
            if cell.policy == FULL:
                lines.append(_freed(searches, cell, reference))
            lines.append(
                f"| {algorithm} | {searches.label(cell.policy)} "
                f"| {'' if cell.budget == 'any' else cell.budget} "
                f"| {len(rows)} / {problems} "
                f"| {searches.ratio(cell, reference, 'peak_hbm_kv_bytes')} "
                f"| {searches.ratio(cell, reference, 'hbm_kv_byte_s')} "
                f"| {rows['evicted_tokens'].mean():,.0f} | {rows['rehydrated_tokens'].mean():,.0f} "
                f"| {'' if kept != kept else f'{100 * kept:.1f}%'} |"
            )
    return lines


def _freed(searches: Searches, cell: Cell, reference: Cell) -> str:
    """The search alone: what it gives up is freed at once, and nothing else."""
    fits = f"{len(searches.groups[cell])} / {len(searches.groups[reference])}"
    peak = searches.ratio(cell, reference, "peak_held_kv_bytes", "peak_hbm_kv_bytes")
    area = searches.ratio(cell, reference, "held_kv_byte_s", "hbm_kv_byte_s")
    return f"| {cell.algorithm} | none, given up is freed | | {fits} | {peak} | {area} | 0 | 0 | |"


#: From the page's folder.
FIGURE = "../../docs/assets/ets-depth.svg"


def page(results: Results, depths: Depths) -> str:
    """The whole page."""
    banks = {name: results.bank(name) for name in results.facts}
    shown = [name for name in BANKS if name in banks]
    first = banks[shown[0]].facts
    versions = ", ".join(f"{name} {version}" for name, version in first["software"].items())
    lines = [
        "# Searches on the same thoughts",
        "",
        "Accuracy against width of every search algorithm, and the KV size of ETS against REBASE, "
        "on banks of thoughts of the reference models: each search walks the thoughts that it "
        "would have drawn. Held-out problems. Regenerate with (`FOLDER` takes the banks, tens of "
        "MB each)",
        "",
        "```",
        f"python benchmarks/searches.py record {' '.join(banks)} --banks FOLDER",
        f"python benchmarks/searches.py run {' '.join(banks)} --banks FOLDER",
        "python benchmarks/searches_page.py",
        "```",
        "",
        f"Thoughts were drawn at temperature 1 with seed {first['seed']} ({versions}). Bytes and "
        f"seconds are those of {first['geometry']} on {first['profile']}, simulated; ratios of "
        "bytes are the same for any geometry. A row per search is in `results.parquet`.",
        "",
        "Intervals are 95%: Clopper-Pearson for accuracies, Bonferroni over the shares gained and "
        "lost for differences (both on the same problems), and a paired bootstrap over problems "
        "for ratios. *KV size*: unique tokens of all unfinished candidates and their ancestors, "
        "summed over selections, without the prompt, as in ETS's tables 1 and 2; *less* says how "
        "many times smaller than REBASE's. *HBM peak*: nothing is freed; *held peak*: what a "
        "search has given up is freed at once. *Misses*: thoughts asked for that the bank lacks.",
        "",
        "## What comes out",
        "",
        *(f"- {finding}" for finding in findings(banks, depths)),
        "",
        "## What cannot be concluded",
        "",
        *(f"- {limit}" for limit in limits(banks)),
        "",
        *section(depths, FIGURE),
    ]
    for name in shown:
        searches = banks[name]
        facts = searches.facts
        lines += [
            "",
            f"## {BANKS[name]}",
            "",
            f"`{name}`: {facts['problems']} problems of {facts['task']}, {reward_text(searches)}.",
            "",
            *table(searches),
        ]
        if any(cell.swept for cell in searches.groups):
            lines += ["", f"### lambda_b on `{name}`", "", *sweep_table(searches)]
    lines += _managed(banks)
    lines += ["", "## CPU time", "", *_speed(banks)]
    return "\n".join(lines) + "\n"


def _managed(banks: dict[str, Searches]) -> list[str]:
    found = []
    for name, searches in banks.items():
        if searches.facts["policies"]:
            attention = (
                "with attention" if name == SIGNALS else "no attention is recorded for ArborKV"
            )
            found += [
                "",
                f"## A policy under the search: `{name}`",
                "",
                f"Width {searches.facts['widths'][0]}, {searches.facts['problems']} problems, "
                f"{attention}. Budgets are shares of each search's own tokens. Ratios are over the "
                "problems on which the budget could hold the search. Answers are those of the "
                "bank: what eviction does to them is not in here (reports/quality).",
                "",
                *policy_table(searches),
            ]
    return found


def _speed(banks: dict[str, Searches]) -> list[str]:
    lines = [
        "Walking and replaying, on one core of a shared machine, reading included:",
        "",
        "| bank | problems | searches | width | CPU seconds |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, searches in banks.items():
        for what, seconds in searches.facts["cpu_s"].items():
            if what.startswith("width "):
                width = int(what.partition(" ")[2])
                kinds = sum(1 for _ in searches.cells(width=width))
                lines.append(
                    f"| `{name}` | {searches.facts['problems']} | {kinds} | {width} | {seconds} |"
                )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("reports/search"))
    folder = parser.parse_args().folder
    (folder / "README.md").write_text(page(Results.read(folder / "results.parquet"), Depths.read()))
    print(f"wrote {folder / 'README.md'}")


if __name__ == "__main__":
    main()
