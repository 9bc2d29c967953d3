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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from scipy.stats import beta, fisher_exact

sys.path.insert(0, str(Path(__file__).parents[1]))

from arborsim.core.statistics import SIGNIFICANT
from benchmarks.quality_arms import EXPERIMENTS
from benchmarks.quality_bound import Bound, differences, steps_text

TITLES = {
    "cliff": "The eviction cliff",
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
ABOUT = {
    "cliff": "chain, 32 lines, greedy; the prompt is kept by all (its share of a search is about "
    "0.37), the budget is a share of the search's tokens. The hierarchy destroys the share r of "
    "the reasoning tokens instead of keeping to a budget. The arms from TOVA on were run on "
    "2026-11-23.",
    "family": "chain, 32 lines, greedy; all keep the prompt and the newest 16 tokens.",
    "epikv-rivals": "chain, 32 lines, greedy; all but H2O keep the prompt and the newest 16 "
    "tokens. ThinKV's segments of 128 tokens keep 64 at most, whatever the budget; short segments "
    "of 32 keep 32, 28 or 20. Swapped layers rank by z_B - z_A. H2O is as the paper runs it.",
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


@dataclass(frozen=True)
class Stored:
    """What one experiment has stored."""

    name: str
    head: dict[str, Any]
    rows: list[dict[str, Any]]


def read(folder: Path) -> list[Stored]:
    """All experiments of a folder, in the order of the page."""
    found = []
    for name in TITLES:
        path = folder / f"{name}.jsonl"
        if path.exists():
            head, *rows = (json.loads(line) for line in path.read_text().splitlines())
            found.append(Stored(name, head, rows))
    return found


def interval(right: int, n: int) -> tuple[float, float]:
    """Clopper-Pearson, 95%."""
    low = beta.ppf(0.025, right, n - right + 1) if right else 0.0
    high = beta.ppf(0.975, right + 1, n - right) if right < n else 1.0
    return float(low), float(high)


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
        low, high = interval(right, n)
        others = [by_arm[full][row["episode"]] for row in could if row["episode"] in by_arm[full]]
        full_right = sum(bool(row["correct"]) for row in others)
        against = [[right, n - right], [full_right, len(others) - full_right]]
        p = f"{fisher_exact(against).pvalue:.2g}" if i != full else ""
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


def rows_of(stored: Stored, label: str, budget: str) -> list[dict[str, Any]]:
    """What an arm could search."""
    numbers = {i for i, arm in enumerate(stored.head["arms"])
               if (arm["label"], arm["budget"]) == (label, budget)}  # fmt: skip
    return [row for row in stored.rows if row["arm"] in numbers and not row["infeasible"]]


def shown(stored: Stored, label: str, budget: str) -> str:
    """An arm's accuracy as the text quotes it."""
    could = rows_of(stored, label, budget)
    if not could:
        return "unknown"
    right = sum(bool(row["correct"]) for row in could)
    return f"{100 * right / len(could):.1f}% (n = {len(could)})"


def _beside_full(stored: Stored) -> list[str]:
    """Each arm's accuracy and that of full retention on the same problems."""
    full = next(i for i, arm in enumerate(stored.head["arms"]) if arm["policy"] == "full")
    kept = {row["episode"]: bool(row["correct"]) for row in stored.rows if row["arm"] == full}
    found = []
    for i, arm in enumerate(stored.head["arms"]):
        of_arm = [r for r in stored.rows if r["arm"] == i and not r["infeasible"]]
        rows = [row for row in of_arm if row["episode"] in kept]
        if i == full or not rows:
            continue
        n = len(rows)
        right, theirs = sum(bool(r["correct"]) for r in rows), sum(kept[r["episode"]] for r in rows)
        p = fisher_exact([[right, n - right], [theirs, n - theirs]]).pvalue
        found.append(
            f"{arm['label']} at {arm['budget']}: {100 * right / n:.1f}% against "
            f"{100 * theirs / n:.1f}% (n = {n}, p = {p:.2g})"
        )
    return found


def about_needed(stored: Stored, bound: Bound) -> list[str]:
    """What the bound says of a table."""
    if not bound.alone:
        return []
    alone = list(bound.alone.values())
    right = sum(bool(row["correct"]) for row in alone)
    found = [
        f"Needed tokens alone take {bound.peak} of a whole search at their peak, and answer "
        f"{100 * right / len(alone):.1f}% (n = {len(alone)}). The column of points compares with "
        "`needed` on the same problems, at the budget in brackets where that is another: the next "
        "lower one, or needed tokens alone."
    ]
    whole = {row["episode"]: bool(row["correct"]) for row in rows_of(stored, "full", "1")}
    own = [row for row in alone if row["episode"] in whole]
    theirs = sum(whole[row["episode"]] for row in own)
    right = sum(bool(row["correct"]) for row in own)
    table = [[right, len(own) - right], [theirs, len(own) - theirs]]
    if right < theirs and fisher_exact(table).pvalue < SIGNIFICANT:
        goes_back = "search" in EXPERIMENTS[stored.name]().search
        found.append(
            f"Full retention answers {100 * theirs / len(own):.1f}% of these problems: the model "
            "reads more than the task says that later tokens of a path read"
            + (", and a tree search goes on from paths that `needed` gave up. It is no bound here."
               if goes_back else ".")
        )  # fmt: skip
    return found


def what_separates(stored: Stored) -> list[str]:
    """Mass against recency of reading, and what keeping the prompt does, from rows of both arms."""

    def find(label: str, budget: str) -> list[dict[str, Any]]:
        return rows_of(stored, label, budget)

    budgets = [arm["budget"] for arm in stored.head["arms"] if arm["policy"] == "random"]
    budgets = list(dict.fromkeys(budgets))
    found = []
    recency = differences(
        [("raas", "h2o"), ("raas, prompt kept", "h2o, prompt kept"),
         ("tova", "h2o"), ("tova, prompt kept", "h2o, prompt kept")], budgets, find,
    )  # fmt: skip
    if recency:
        found.append(
            "Recency of reading (RaaS: when a token was last attended to; TOVA: what the newest "
            "query attends to) against mass (H2O: all attention so far): " + "; ".join(recency)
            + "."
        )  # fmt: skip
    labels = dict.fromkeys(arm["label"] for arm in stored.head["arms"])
    pairs = [(f"{each}, prompt kept", each) for each in labels if f"{each}, prompt kept" in labels]
    kept = differences(pairs, budgets, find)
    if kept:
        found.append(f"Keeping the prompt under the same budget: {'; '.join(kept)}.")
    chance = differences(
        [(f"{each}, prompt kept", "random, prompt kept") for each in
         ("h2o", "raas", "tova", "rkv", "epikv", "hs-variance", "band-adaptive", "streaming")],
        budgets, find,
    )  # fmt: skip
    if chance:
        found.append(f"Against chance, the prompt kept by both: {'; '.join(chance)}.")
    return found


def findings(stored: Stored) -> list[str]:
    """What a table shows, and where it disagrees with a paper."""

    def at(label: str, budget: str = "1") -> str:
        return shown(stored, label, budget)

    if stored.name in ("tail", "tail-deep"):
        return [
            f"Full retention {at('full')}. An answer counts only if every needed line is right, so "
            "needed steps tell arms apart where answers do not. Arms without a row have not been "
            "run.",
            *what_separates(stored),
        ]
    if stored.name == "long":
        names = ("h2o", "streaming-llm", "epikv", "arkv", "lag-kv")
        said = [f"{name} {at(name, '0.85')}" for name in names]
        known = [each for each in said if "unknown" not in each]
        return [
            f"Full retention {at('full')}; at 0.85 {', '.join(known)}. No policy pins the prompt "
            "unless it does so as it comes. Arms without a row have not been run."
        ]
    if stored.name == "cliff":
        later = ("raas", "rkv", "quest, 2 layers dense", "adakv", "pyramidkv", "tova")
        said = [f"{name} {at(name, '0.87')}" for name in later]
        more = ", ".join(each for each in said if "unknown" not in each)
        return [
            "Under most policies answers fall off a cliff: hardly anything is lost at 0.95 of the "
            "tokens and nearly everything at 0.69. Attention tells what will be needed: at 0.87, "
            f"H2O {at('h2o', '0.87')}, random {at('random', '0.87')}, the newest "
            f"{at('streaming', '0.87')}. **EpiKV with the published layers does worse than "
            f"chance**, {at('epikv', '0.87')}: their contrast has the wrong sign here. With the "
            "layers that `calibrate bands` picks it is right about as often as full retention "
            "(docs/calibration.md, reports/claims)."
            + (f" Later arms at 0.87: {more}." if more else "")
        ]
    if stored.name == "family":
        arms = [arm["label"] for arm in stored.head["arms"] if arm["budget"] == "0.87"]
        rows = [f"{label} {at(label, '0.87')}" for label in arms]
        known = [row for row in rows if "unknown" not in row]
        return [
            f"At 0.87: {', '.join(known)}. Random eviction of the same tokens is in the table "
            "above. Arms without a row have not been run."
        ]
    if stored.name == "epikv-rivals":
        arms = [arm["label"] for arm in stored.head["arms"] if arm["budget"] == "0.87"]
        known = [row for row in (f"{label} {at(label, '0.87')}" for label in arms)
                 if "unknown" not in row]  # fmt: skip
        return [
            f"At 0.87: {', '.join(known)}. The variance of a token's key, read from the cache, "
            "tells what will be needed; the published mean over 64 tokens, seven lines of a "
            "chain, takes that away (table above). Arms without a row have not been run."
        ]
    if stored.name == "grid":
        return [
            "Rows of equal r are the same searches whatever beta: outputs are the same bits "
            "(Proposition 1), so only the share destroyed costs answers, and HBM is what beta "
            "saves. The staging buffers of this recall mode are not in the peak of tokens."
        ]
    if stored.name == "hierarchy":
        return [
            "Rows of equal r differ in beta alone. What the same r costs if it is a share of all "
            "tokens ever, other scores, windows and intervals: reports/claims. Arms without a row "
            "have not been run."
        ]
    if stored.name == "arkv":
        return [
            "The task has no redundancy in its prompt, which ARKV may evict, so a few percent of "
            f"the cache cost what they cost no other policy: {at('arkv-origin', '0.97')} at 0.97. "
            f"FP8 costs no answers: with all kept tokens rounded {at('arkv-quant', '0.97')}, with "
            f"the less important ones {at('arkv', '0.97')}. As the public code decides, the same "
            f"two are right in {at('arkv-quant, as published', '0.97')} and "
            f"{at('arkv, as published', '0.97')}: the collapse that the paper reports of uniform "
            "quantisation comes from rounded tokens that are lost, not from rounding. With the "
            f"prompt kept, 0.87 of the tokens give {at('arkv, prompt kept', '0.87')}. Arms without "
            "a row have not been run."
        ]
    if stored.name == "game24":
        return [
            "Paths are short, so most of a tree can go without any loss: at half of the tokens "
            f"random eviction is right in {at('random', '0.5')}, full retention in {at('full')}. "
            "Only a quarter hurts. ArborKV keeps whole active paths and gives up, with a reason, "
            "where these alone exceed the budget; where it can run, rehydration makes no visible "
            "difference here. The paper's gains at rho 0.25 cannot be tested on trees this small."
        ]
    if stored.name == "chain-tree":
        return [
            "Paths are needed from their first line on, and most trees are several times a path. "
            "Right answers, and those of full retention on the same problems: "
            + "; ".join(_beside_full(stored))
            + ". A budget that cannot hold the active path is infeasible for ArborKV, which leaves "
            "out short trees: compare within a line. At a quarter, whole paths are worth more than "
            "what any other arm keeps, as the paper says; at half StreamingLLM, which gives up "
            "whole branches first, is level. What rehydration adds can be read from its two arms."
        ]
    if stored.name == "arborkv-ablations":
        return [
            "Right answers, and those of full retention on the same problems: "
            + "; ".join(_beside_full(stored))
            + ". A path that is whole when it is read gives full retention's tokens, so arms "
            "differ only where paths are not whole."
        ]
    if stored.name == "newer":
        formats = ("8 bits", "4 bits", "2 bits", "2 bits, outliers")
        bits = [f"{each} {at(f'kivi, {each}')}" for each in formats]
        bits = [each for each in bits if "unknown" not in each]
        return [
            "What drops half of the tokens, or leaves them unread, gives hardly a right answer "
            "here, however it ranks and shares the budget out, though what the task still reads is "
            "less than half of a search at its peak (`needed`, first table). The exception is "
            f"small: expected attention {at('expected-attention', '0.5')}. Bits can be saved: "
            f"KIVI with {', '.join(bits)}. Arms without a row have not been run."
        ]
    if stored.name == "newer-game24":
        quarter = [
            f"{label} {at(label, '0.25')}"
            for label in ("pyramidkv", "h2o", "duoattention", "adakv", "random", "streaming",
                          "expected-attention", "hs-cosine", "arkv-origin", "arkv", "arkv-quant")
        ]  # fmt: skip
        return [
            "At half of the tokens nearly every arm is as right as full retention; expected "
            "attention, which knows few queries in trees this small, is not "
            f"({at('expected-attention', '0.5')}). "
            f"At a quarter: {', '.join(quarter)}. Layers that keep less the deeper they are do "
            "best. Quest holds everything and reads a share: with two of six layers whole, as "
            f"published, a quarter costs little ({at('quest, 2 layers dense', '0.25')}), in all "
            f"layers much ({at('quest', '0.25')}); it chooses with the query one step before. "
            "KIVI rounds little of these trees, whose thoughts are shorter than its groups: it "
            "saves 4% of the bytes and costs no answer."
        ]
    return []


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
        "of these end as soon as they can no longer succeed; then their steps are not counted.",
    ]
    for stored in all_stored:
        about = ABOUT[stored.name]
        if stored.head["date"] != all_stored[0].head["date"]:
            about += f" Run on {stored.head['date']}."
        bound = bound_of(stored, all_stored)
        lines += ["", f"## {TITLES[stored.name]}", "", about, "", *table(stored, bound)]
        for finding in (*findings(stored), *about_needed(stored, bound)):
            lines += ["", finding]
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
    pq.write_table(made, folder / "results.parquet", compression="zstd")
    (folder / "README.md").write_text(page(all_stored))
    print(f"{folder / 'README.md'}: {len(rows)} searches")


if __name__ == "__main__":
    main()
