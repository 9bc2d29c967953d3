"""What the tables of ``reports/quality`` show, in words that follow the numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from arborsim.core.statistics import SIGNIFICANT, fisher_p
from benchmarks.quality_arms import EXPERIMENTS
from benchmarks.quality_bound import Bound, differences


@dataclass(frozen=True)
class Stored:
    """What one experiment has stored."""

    name: str
    head: dict[str, Any]
    rows: list[dict[str, Any]]


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
        p = fisher_p(right, theirs, n)
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
    if right < theirs and fisher_p(right, theirs, len(own)) < SIGNIFICANT:
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
        [(f"{one}{kept}", f"h2o, shared{kept}") for one in ("raas, median", "tova")
         for kept in ("", ", prompt kept")], budgets, find,
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
         ("h2o, shared", "raas, median", "tova", "rkv", "epikv", "hs-variance", "band-adaptive",
          "streaming")],
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
        names = ("h2o, shared", "streaming-llm", "epikv", "arkv", "lag-kv")
        said = [f"{name} {at(name, '0.85')}" for name in names]
        known = [each for each in said if "unknown" not in each]
        return [
            f"Full retention {at('full')}; at 0.85 {', '.join(known)}. No policy pins the prompt "
            "unless it does so as it comes. Arms without a row have not been run."
        ]
    if stored.name == "cliff":
        later = ("raas, median", "rkv", "quest, 2 layers dense", "adakv", "pyramidkv", "tova")
        said = [f"{name} {at(name, '0.87')}" for name in later]
        more = ", ".join(each for each in said if "unknown" not in each)
        return [
            "Under most policies answers fall off a cliff: hardly anything is lost at 0.95 of the "
            "tokens and nearly everything at 0.69. Attention tells what will be needed: at 0.87, "
            f"H2O (shared) {at('h2o, shared', '0.87')}, random {at('random', '0.87')}, the newest "
            f"{at('streaming', '0.87')}. **EpiKV with the published layers does worse than "
            f"chance**, {at('epikv', '0.87')}: their contrast has the wrong sign here. "
            "Inverted, z_B - z_A, it is right about as often as full retention; the paper's own "
            "protocol refuses that contrast on this model, too (held-out rho -0.006: "
            "docs/calibration.md, reports/claims)."
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
            for label in ("pyramidkv", "h2o, shared", "duoattention", "adakv", "random",
                          "streaming", "expected-attention", "hs-cosine", "arkv-origin", "arkv",
                          "arkv-quant")
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


#: Shares of the tokens in the table of both models.
_SIDE_BY_SIDE = ("0.3", "0.5", "0.7", "0.9")


def side_by_side(one: Stored, other: Stored) -> list[str]:
    """Right answers of arms that keep the prompt, on a model and a deeper one."""
    both = (one, other)

    def cell(stored: Stored, label: str, budget: str) -> str:
        could = rows_of(stored, label, budget)
        return (
            f"{100 * sum(bool(row['correct']) for row in could) / len(could):.0f}" if could else ""
        )

    labels = dict.fromkeys(arm["label"] for arm in one.head["arms"])
    lines = {
        label: [cell(stored, label, budget) for stored in both for budget in _SIDE_BY_SIDE]
        for label in labels if label.endswith("prompt kept") or label == "needed"
    }  # fmt: skip
    lines = {label: cells for label, cells in lines.items() if any(cells)}
    layers = [f"{layers} layers at {budget}" for layers in (6, 24) for budget in _SIDE_BY_SIDE]
    return [
        "## The long tail on both models", "",
        "Right answers in percent, of what the two tables above count; empty: not run.", "",
        f"| arm | {' | '.join(layers)} |", "|---|" + "---:|" * len(layers),
        *(f"| {label.removesuffix(', prompt kept')} | {' | '.join(cells)} |"
          for label, cells in lines.items()),
    ]  # fmt: skip
