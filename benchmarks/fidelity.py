"""Fidelity of policies on SmolLM2: prose, code and reasoning, document by document.

    python benchmarks/fidelity.py run --minutes 60      # goes on with what build/fidelity holds
    python benchmarks/fidelity.py page                  # the parquet and its page, of what is there

Every round reads a document of each kind, 512 tokens long, under the policies as their authors run
them; evicted tokens are masked.  Prose is this repository's documentation, code its own source,
reasoning worked solutions that `solutions` writes.  Writes ``reports/quality/fidelity.parquet``, a
row per document, policy and budget, and ``reports/quality/fidelity.md`` from it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import arborsim
from arborsim.core.statistics import LEVEL, RESAMPLES, spearman
from arborsim.core.tables import write_table
from arborsim.play.fidelity import PARTS
from arborsim.play.results import MARK
from arborsim.policies.registry import build
from arborsim.products.fidelity.results import FidelityResults
from arborsim.products.replay.outside import outside_answers

LOGS, OUT = ROOT / "build/fidelity", ROOT / "reports/quality/fidelity.parquet"
#: The most used first: each has its figures before the next begins.
POLICIES = (
    *("streaming-llm", "h2o", "snapkv", "tova", "pyramidkv", "adakv", "rkv", "raas"),
    *("keydiff", "expected-attention", "quest", "random"),
)
BUDGETS, MORE = (0.5, 0.25), (0.125, 0.75)
TOKENS, ROUNDS = 512, 20
_COLUMNS = ("kind", "document", "policy", "budget", "judged", "kl", "kl_tail", "agree", "nll")


def prose() -> str:
    """The pages of the documentation, without code and tables."""
    lines = []
    for path in sorted((ROOT / "docs").glob("*.md")):
        fenced = False
        for line in path.read_text(encoding="utf-8").splitlines():
            fenced ^= line.startswith("```")
            if not fenced and not line.startswith(("```", "|", "<", "#")):
                lines.append(line)
    return "\n".join(lines)


def code() -> str:
    """Python source of the package."""
    paths = sorted((ROOT / "arborsim/policies").rglob("*.py"))
    return "\n\n".join(path.read_text(encoding="utf-8") for path in paths)


def solutions(seed: int = 0, problems: int = 400) -> str:
    """Worked solutions of sums in words."""
    rng = np.random.default_rng(seed)
    names, things = ("Anna", "Ben", "Chloe", "David"), ("apples", "pens", "coins", "stamps")
    found = []
    for _ in range(problems):
        who, other = rng.permutation(names)[:2]
        thing = things[rng.integers(len(things))]
        have, more, times, given = (int(n) for n in rng.integers(2, 30, 4))
        total, all_of_them = have + more, (have + more) * times
        left = all_of_them - min(given, all_of_them)
        found.append(
            f"Problem: {who} has {have} {thing} and buys {more} more. {other} has {times} times as "
            f"many as {who} now, and gives {min(given, all_of_them)} away. How many {thing} does "
            f"{other} have left?\nSolution: First, {who} has {have} + {more} = {total} {thing}. "
            f"So {other} has {times} * {total} = {all_of_them} {thing}. After giving some away, "
            f"{all_of_them} - {min(given, all_of_them)} = {left} {thing} are left.\n"
            f"The answer is {left}.\n"
        )
    return "\n".join(found)


KINDS = {"prose": prose, "code": code, "reasoning": solutions}


def texts() -> dict[str, list[Path]]:
    """A file per document of each kind, cut by characters: more than `TOKENS` tokens each."""
    found: dict[str, list[Path]] = {}
    for kind, make in KINDS.items():
        text, size = make(), 6 * TOKENS
        step = max(size, len(text) // ROUNDS)
        for number in range(min(ROUNDS, len(text) // step)):
            path = LOGS / f"{kind}-{number}.txt"
            piece = text[number * step : number * step + size]
            path.write_text(piece[piece.find("\n") + 1 :], encoding="utf-8")
            found.setdefault(kind, []).append(path)
    return found


def run(minutes: float) -> None:
    """Read round by round until the time is up; the round that runs is finished."""
    LOGS.mkdir(parents=True, exist_ok=True)
    until, files = time.monotonic() + 60 * minutes, texts()
    known = stored().groupby(["document", "budget"])["policy"].nunique()
    done = {cell for cell, count in known.items() if count == len(POLICIES)}
    for budgets in (BUDGETS, MORE):
        for number in range(ROUNDS):
            for kind in KINDS:
                if time.monotonic() > until or number >= len(files[kind]):
                    continue
                if (f"{kind}-{number}", f"{budgets[-1]:g}") in done:
                    continue
                log = LOGS / f"{kind}-{number}-{budgets[0]}.jsonl"
                arborsim.fidelity(
                    model="smollm2", text=files[kind][number], tokens=TOKENS, documents=1,
                    policies=POLICIES, budgets=budgets, masked=True, out=log, resume=log.exists(),
                )  # fmt: skip
                print(f"{log.name} is complete", flush=True)


def stored() -> pd.DataFrame:
    """The rows that the parquet holds already."""
    empty = pd.DataFrame(columns=[*_COLUMNS, "full_nll"])
    return pd.read_parquet(OUT) if OUT.exists() else empty


def gathered() -> pd.DataFrame:
    """The parquet and what all logs hold, a row per document, policy and budget."""
    rows = stored().to_dict("records")
    for log in sorted(LOGS.glob("*.jsonl")):
        results = arborsim.load_results(log)
        assert isinstance(results, FidelityResults)
        kind = log.name.partition("-")[0]
        for each in results.to_pandas().query("infeasible == ''").to_dict("records"):
            counts = np.array([each[f"counts_{part}"] for part in range(1, PARTS + 1)])
            means = {
                name: float(
                    sum(each[f"{name}_{part}"] * counts[part - 1] for part in range(1, PARTS + 1))
                    / counts.sum()
                )
                for name in ("kl", "nll", "full_nll")
            }
            agree = sum(each[f"agree_{part}"] for part in range(1, PARTS + 1))
            named = {"kind": kind, "document": log.stem.rpartition("-")[0]}
            known = {name: each[name] for name in ("policy", "budget", "kl_tail")}
            rows.append({**named, **known, "judged": int(counts.sum()), "agree": agree, **means})
    frame = pd.DataFrame(rows).drop_duplicates(["document", "policy", "budget"])
    return frame[[*_COLUMNS, "full_nll"]].round(6)


def figures(frame: pd.DataFrame) -> Iterator[dict[str, object]]:
    """A row per policy and budget over all documents, with intervals over documents."""
    rng = np.random.default_rng(0)
    for (policy, budget), own in frame.groupby(["policy", "budget"], sort=False):
        n = own["judged"].to_numpy(float)
        drawn = rng.integers(0, len(own), (RESAMPLES, len(own)))
        kl, agree = own["kl"].to_numpy() * n, own["agree"].to_numpy(float)
        lost = (own["nll"] - own["full_nll"]).to_numpy() * n
        tail = (1 - LEVEL) / 2
        ends = np.quantile(kl[drawn].sum(1) / n[drawn].sum(1), [tail, 1 - tail])
        told = f"{ends[0]:.3f}-{ends[1]:.3f}" if len(own) > 1 else "n/a"
        yield {
            "policy": policy, "budget": budget, "kl": kl.sum() / n.sum(), "interval": told,
            "tail": (own["kl_tail"] * n).sum() / n.sum(),
            "agree": agree.sum() / n.sum(), "ratio": float(np.exp(lost.sum() / n.sum())),
            "documents": len(own), "judged": int(n.sum()),
        }  # fmt: skip


def page(frame: pd.DataFrame) -> str:
    """The page, as Markdown."""
    found = pd.DataFrame(figures(frame))
    by_kind = frame.drop_duplicates("document")["kind"].value_counts()
    said = ", ".join(f"{count} of {kind}" for kind, count in by_kind.items())
    lines = [
        "# Fidelity on SmolLM2", "",
        "Made by `python benchmarks/fidelity.py page` from `fidelity.parquet`, which `... run` "
        "fills document by document. SmolLM2-135M-Instruct (Q4_1, dequantised to float32) reads "
        f"documents of {TOKENS} tokens ({said}); the first quarter is the prompt. Policies run as "
        "their authors run them, evicted tokens are masked. KL(full || policy) of the next token "
        "in nats, its 95% interval by a bootstrap over documents, the 95th percentile of a "
        "document's divergences (mean over documents), the share of judged tokens with the same "
        "top token, and perplexity relative to full retention's. Every row says its n. One "
        f"document gives no interval, and those of fewer than 10 are too narrow. {MARK} does not "
        "keep to the budget: what is generated stays, or more is held than is read.", "",
    ]  # fmt: skip
    for budget in sorted(set(found["budget"]) - {"any"}, key=float):
        lines += [
            f"## Budget {budget}", "",
            "| policy | KL | 95% interval | p95 | same top | perplexity | documents | tokens |",
            "|---|---|---|---|---|---|---|---|",
        ]  # fmt: skip
        for row in found[found["budget"] == budget].sort_values("kl").to_dict("records"):
            lines.append(
                f"| {named(row['policy'])} | {row['kl']:.3f} | {row['interval']} | "
                f"{row['tail']:.3f} | {100 * row['agree']:.1f}% | {row['ratio']:.3f} | "
                f"{row['documents']} | {row['judged']:,} |"
            )
        lines.append("")
    return "\n".join([*lines, *kinds(frame), *against_answers(found)])


def named(policy: str) -> str:
    """The policy, marked if it does not keep to the budget."""
    return policy if build(policy).bounded else f"{policy}{MARK}"


def kinds(frame: pd.DataFrame) -> list[str]:
    """Whether kinds of text rank policies alike."""
    kl = frame[frame["budget"] != "any"].groupby(["kind", "policy", "budget"])["kl"].mean()
    wide = kl.unstack("kind").dropna()
    lines = ["## Do kinds of text rank policies alike?", ""]
    names = list(wide.columns)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            rho = spearman(wide[one].to_numpy(), wide[other].to_numpy())
            lines.append(f"- {one} and {other}: Spearman {rho:.2f} (n {len(wide)} settings).")
    return [*lines, *["Fewer than two kinds were read."] * (len(names) < 2), ""]


def against_answers(found: pd.DataFrame) -> list[str]:
    """Order of R-KV's arms by fidelity here and by right answers that its authors counted."""
    own = found[found["policy"] == "rkv"]
    at = {float(row["budget"]): row["kl"] for row in own.to_dict("records")}
    lines = ["## Against right answers that others counted", ""]
    if len(at) < 2:
        return [*lines, "R-KV was not read at two budgets yet.", ""]
    shares, kl = (np.array(each) for each in zip(*sorted(at.items()), strict=True))
    arms = [
        (each, np.interp(each.share, shares, np.log(kl)))
        for each in outside_answers()
        if each.policy == "rkv" and shares[0] <= each.share <= shares[-1]
    ]
    lines += [
        f"Arms of R-KV whose budget is {shares[0]} to {shares[-1]} of full retention's mean "
        "output, the KL interpolated at that share (in its logarithm), and the right answers lost "
        "to full retention:",
        "", "| model, problems | budget | share | KL here | right | full | n |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for each, log_kl in arms:
        lines.append(
            f"| {each.model}, {each.dataset} | {each.budget_tokens} | {each.share:.2f} | "
            f"{np.exp(log_kl):.3f} | {each.right_percent:.1f}% | {each.full_percent:.1f}% | "
            f"{each.n} |"
        )
    lost = np.array([each.full_percent - each.right_percent for each, _ in arms])
    rho = spearman(np.array([log_kl for _, log_kl in arms]), lost)
    said = "too few arms for a rank correlation" if len(arms) < 4 else f"Spearman {rho:.2f}"
    return [*lines, "", f"KL here and points lost there: {said} (n {len(arms)} arms).", ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("run", "page"))
    parser.add_argument("--minutes", type=float, default=60.0)
    given = parser.parse_args()
    if given.what == "run":
        run(given.minutes)
        return
    frame = gathered()
    made = {"kind": "fidelity-benchmark", "command": "python benchmarks/fidelity.py page"}
    write_table(frame, OUT, made)
    OUT.with_suffix(".md").write_text(page(frame), encoding="utf-8")


if __name__ == "__main__":
    main()
