"""Make the tables of ``reports/quality`` from what `benchmarks/quality.py` has stored.

    python benchmarks/quality_page.py

Writes ``results.parquet`` (a row per search and arm, with the facts in its metadata) and
``README.md``: accuracy with 95% Clopper-Pearson intervals, and Fisher's exact p against full
retention on the problems that the arm could search; the distance to `needed`, the bound for
answers, and needed steps that are right (`benchmarks/quality_bound.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[1]))

from arborsim.core.statistics import clopper_pearson, fisher_p
from benchmarks.quality_arms import EXPERIMENTS
from benchmarks.quality_bound import Bound, steps_text
from benchmarks.quality_findings import Stored, about_needed, findings, side_by_side

TITLES = {
    "cliff": "The eviction cliff",
    "published": "Methods as their authors run them: chains of 32 lines",
    "published-12": "Methods as their authors run them: chains of 12 lines",
    "published-tail": "Methods as their authors run them: a task with filler",
    "published-deep": "Methods as their authors run them: filler, 24 layers",
    "family": "EpiKV's family and other scores without attention",
    "epikv-rivals": "EpiKV's family against the methods of its paper",
    "long": "The shipped chains",
    "grid": "The hierarchy: share in HBM against share evicted",
    "hierarchy": "The hierarchy at its paper's ratios, with its paper's scores, and R-KV",
    "arkv": "ARKV and its two baselines",
    "game24": "ArborKV against baselines on trees of thoughts",
    "chain-tree": "ArborKV against baselines on deep searches",
    "arborkv-ablations": "ArborKV without its parts, on trees several times a path",
    "newer": "Uneven budgets, selection, few bits: a chain",
    "newer-game24": "Uneven budgets, selection, few bits: trees of thoughts",
    "tail": "A task of which most tokens are read by nothing later",
    "tail-deep": "The same task, 24 layers",
}
PUBLISHED = (
    "Settings are the authors': H2O ranks for each layer and KV head and keeps the newest half of "
    "the budget, and with `prompt kept` the prompt as well (small budgets cannot hold both); TOVA "
    "ranks per layer; RaaS counts pages of 16 tokens and keeps the prompt; R-KV decides every 128 "
    "iterations and holds more until then (see its peaks; chains of 12 lines are over before); "
    "R-KV and AdaKV rank per KV head; SnapKV cuts a prompt larger than the budget, once: here "
    "at the smallest budget alone. The prompt is evictable unless said. Arms without a row have "
    "not been run."
)
ABOUT = {
    "cliff": "chain, 32 lines, greedy; the prompt is kept by all (its share of a search is about "
    "0.37), the budget is a share of the search's tokens. The hierarchy destroys the share r of "
    "the reasoning tokens instead of keeping to a budget. The arms from TOVA on were run on "
    "2026-11-23.",
    "published": f"chain, 32 lines, greedy. {PUBLISHED}",
    "published-12": f"chain, 12 lines, greedy. {PUBLISHED}",
    "published-tail": f"tail, 16 lines, greedy. {PUBLISHED}",
    "published-deep": f"tail, 16 lines, greedy, the model of 24 layers. {PUBLISHED}",
    "family": "chain, 32 lines, greedy; all keep the prompt and the newest 16 tokens.",
    "epikv-rivals": "chain, 32 lines, greedy; all but H2O keep the prompt and the newest 16 "
    "tokens. ThinKV's segments of 128 tokens keep 64 at most, whatever the budget; short segments "
    "of 32 keep 32, 28 or 20. Inverted arms swap both layers: they rank by z_B - z_A. H2O is "
    "as EpiKV's authors run it.",
    "long": "chain, 120 lines, greedy: the first 100 problems like those of the shipped trace "
    "`chain-linear`, under policies as they come.",
    "grid": "chain, 32 lines, greedy; beta is the share of the survivors in HBM (the others lie in "
    "DDR and are still read), r the share destroyed, of all reasoning tokens so far.",
    "hierarchy": "chain, 32 lines, greedy; r is a share of the candidates of every decision, as "
    "Algorithm 1 is printed, so what is destroyed adds up; interval 12 and window 24 are to these "
    "searches what 64 and 128 are to the paper's chains. R-KV keeps the prompt.",
    "arkv": "chain, 32 lines, greedy; window 16, no slack (a cut keeps C - W tokens). The prompt "
    "may be evicted, as in the paper, unless an arm keeps it. Arms `as published` decide as the "
    "public code does: among other things a token in FP8 is lost one step after it was rounded.",
    "game24": "game24, ToT-BFS (5 kept, 8 children), temperature 0.7.",
    "chain-tree": "chain, 24 lines, 4 lines a thought, ToT-DFS, temperature 1; a dead end "
    "keeps 0.7 of its value, so that the search has to go back and trees outgrow their paths.",
    "arborkv-ablations": "chain, 24 lines, 4 lines a thought, DPTS with one leaf at a time, at "
    "most 3 children and 64 thoughts, temperature 1; no answer ends a search, so that trees are "
    "several times a path.",
    "newer": "chain, 32 lines, greedy; no arm pins the prompt, which is 0.37 of a search, so a "
    "budget means the same for all. Quest's budget limits what a step reads, not what HBM holds. "
    "Windows and pages of 16 tokens; KIVI in groups of 32 after the newest 32.",
    "newer-game24": "game24, ToT-BFS (5 kept, 8 children), temperature 0.7; no arm pins the "
    "prompt. Windows of 16 tokens (ARKV: 8), pages of 4; KIVI in groups of 8 after the newest 16.",
    "tail": "tail, 16 lines, greedy; 77% of the reasoning is filler, the prompt is about 0.11 of a "
    "search. All but 4 sinks and the newest 32 tokens are evictable, as far as a policy can "
    "protect them; arms `prompt kept` pin the prompt.",
    "tail-deep": "tail, 16 lines, greedy, arms as above.",
}


def read(folder: Path) -> list[Stored]:
    """All experiments of a folder, in the order of the page."""
    found = []
    for name in TITLES:
        path = folder / f"{name}.jsonl"
        if path.exists():
            head, *rows = (json.loads(line) for line in path.read_text().splitlines())
            found.append(Stored(name, head, rows))
    return found


def bound_of(stored: Stored, all_stored: list[Stored]) -> Bound:
    """The `needed` arms of all experiments that search the same as this one."""
    search = EXPERIMENTS[stored.name]().search
    arms: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for each in all_stored:
        if EXPERIMENTS[each.name]().search == search:
            rows += [row | {"arm": row["arm"] + len(arms)} for row in each.rows]
            arms += each.head["arms"]
    return Bound(arms, rows)


def table(stored: Stored, bound: Bound) -> list[str]:
    """Markdown lines, one per arm."""
    counted = any(row.get("steps") for row in stored.rows)
    extra = ["`needed` has more, points"] * bool(bound) + ["needed steps right"] * counted
    by_arm: dict[int, dict[int, dict[str, Any]]] = {}
    for row in stored.rows:
        by_arm.setdefault(row["arm"], {})[row["episode"]] = row
    full = next(i for i, arm in enumerate(stored.head["arms"]) if arm["policy"] == "full")
    lines = [
        "| arm | budget | right / n | accuracy | 95% interval | full, same problems | p "
        "| infeasible | peak tokens, share of full | peak bytes, share of full "
        "| rehydrated tokens |" + "".join(f" {each} |" for each in extra),
        "|---|" + "---:|" * (10 + len(extra)),
    ]
    for i, arm in enumerate(stored.head["arms"]):
        rows = list(by_arm.get(i, {}).values())
        if not rows:
            continue
        could = [row for row in rows if not row["infeasible"]]
        n, right = len(could), sum(bool(row["correct"]) for row in could)
        name = arm["label"] + " \\*" * any(row.get("masked") for row in rows)
        budget = "" if arm["policy"] in ("full", "hierarchy", "kivi") else arm["budget"]
        if not n:
            lines.append(
                f"| {name} | {budget} | - | - | - | - | - | {len(rows)} | - | - | - |"
                + " - |" * len(extra)
            )
            continue
        low, high = clopper_pearson(right, n)
        others = [by_arm[full][row["episode"]] for row in could if row["episode"] in by_arm[full]]
        full_right = sum(bool(row["correct"]) for row in others)
        p = f"{fisher_p(right, full_right, n):.2g}" if i != full and len(others) == n else ""
        same = f"{100 * full_right / len(others):.1f}%" if i != full and others else ""
        peak = sum(row["peak_tokens"] / row["full_tokens"] for row in could) / n
        hbm = sum(row["peak_hbm_bytes"] for row in could if row["episode"] in by_arm[full])
        full_hbm = sum(row["peak_hbm_bytes"] for row in others)
        back = sum(row["rehydrated"] for row in could) / n
        lines.append(
            f"| {name} | {budget} | {right} / {n} | {100 * right / n:.1f}% "
            f"| {100 * low:.1f} to {100 * high:.1f} | {same} | {p} | {len(rows) - n or ''} "
            f"| {peak:.2f} | {hbm / full_hbm:.2f} | {back:.0f} |"
            + (f" {bound.distance(arm['budget'], could)} |" if bound else "")
            + (f" {steps_text(could)} |" if counted else "")
        )
    return lines


def page(all_stored: list[Stored]) -> str:
    """The whole page."""
    facts = all_stored[0].head["facts"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["software"].items())
    lines = [
        "# Answers under eviction, measured",
        "",
        "Live searches of the reference models in which tokens really are removed (level 3 of the "
        "three levels of quality). Made by `python benchmarks/quality.py EXPERIMENT` and "
        "`python benchmarks/quality_page.py`; every row of every search is in `results.parquet`.",
        "",
        f"Device {facts['device']}, {facts['dtype']}; {versions}; {all_stored[0].head['date']}. "
        "Held-out problems, the same for all arms of a table; n counts searches that the budget "
        "could hold, which are the easier ones where some were infeasible: compare with full "
        "retention *on the same problems*, which the next column gives. Intervals are "
        "Clopper-Pearson, p is Fisher's exact test against that. Peaks are taken before decisions, "
        "so they exceed a budget by the leaves that decode at once. The models are tiny: orders "
        "are evidence, sizes of effects belong to these tasks. Of arms marked * some or all "
        "searches were masked instead: the same policies decide, but what they evict is masked "
        "(`python benchmarks/quality.py --masked`, which tests compare with live searches). Some "
        "of these end as soon as they can no longer succeed: their steps are not counted, and "
        "their peaks are those until then.",
    ]
    for stored in all_stored:
        about = ABOUT[stored.name]
        if stored.head["date"] != all_stored[0].head["date"]:
            about += f" Run on {stored.head['date']}."
        bound = bound_of(stored, all_stored)
        lines += ["", f"## {TITLES[stored.name]}", "", about, "", *table(stored, bound)]
        for finding in (*findings(stored), *about_needed(stored, bound)):
            lines += ["", finding]
    named = {stored.name: stored for stored in all_stored}
    if named.keys() >= {"tail", "tail-deep"}:
        lines += ["", *side_by_side(named["tail"], named["tail-deep"])]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("reports/quality"))
    folder = parser.parse_args().folder
    all_stored = read(folder)
    if not all_stored:
        raise SystemExit(f"{folder}: no results; run benchmarks/quality.py first")
    rows = []
    for stored in all_stored:
        for row in stored.rows:
            arm = stored.head["arms"][row["arm"]]
            named = {"experiment": stored.name, "label": arm["label"], "policy": arm["policy"],
                     "budget": arm["budget"], "settings": json.dumps(arm["settings"])}  # fmt: skip
            # Runs before steps were counted have none; before searches were masked, all were live.
            rows.append(named | {"steps_right": None, "steps": None, "masked": False} | row)
    facts = {stored.name: {k: stored.head[k] for k in ("facts", "date")} for stored in all_stored}
    made = pa.Table.from_pylist(rows).replace_schema_metadata({"arborsim": json.dumps(facts)})
    pq.write_table(made, folder / "results.parquet", compression="zstd", compression_level=19)
    (folder / "README.md").write_text(page(all_stored))
    print(f"{folder / 'README.md'}: {len(rows)} searches")


if __name__ == "__main__":
    main()
