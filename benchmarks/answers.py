"""Make the answers that come with arborsim from committed live runs.

    python benchmarks/answers.py

Writes ``arborsim/products/replay/answers.csv``: a row per policy with settings and budget, counted
in ``reports/quality/results.parquet`` and in the validations of at least 40 problems under
``reports/validation``.  `tests/live/test_answers.py` checks that the file is what this makes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from arborsim.core.statistics import MASKED
from arborsim.play.results import ANY
from arborsim.policies.registry import build, defaults_of, resolved
from arborsim.products.replay.answers import Counted, Searched, to_csv
from arborsim.products.replay.counting import Judged, count
from arborsim.products.validate.files import read_results
from arborsim.products.validate.results import LEAST_PROBLEMS
from benchmarks.quality_arms import EXPERIMENTS

QUALITY = "reports/quality/results.parquet"
OUT = ROOT / "arborsim/products/replay/answers.csv"
#: Counted before the policy was changed (CHANGELOG.md): what it does now is not what was counted.
CHANGED = {("chain-quality", "raas"), ("chain-quality", "segment-hs")}
#: What settings were called when they were stored.
RENAMED = {"keep_prompt": "pin_prompt"}


def quality() -> Iterator[Counted]:
    """Of the experiments of `benchmarks/quality.py`."""
    table = pq.read_table(ROOT / QUALITY)
    about = json.loads(table.schema.metadata[b"arborsim"])
    rows = table.to_pylist()
    masked = {
        (row["experiment"], row["policy"], row["settings"], row["budget"])
        for row in rows if row["masked"]
    }  # fmt: skip
    for name, known in about.items():
        facts = known["facts"]
        request = {"search": "linear", "temperature": 0.0} | EXPERIMENTS[name]().search
        searched = Searched.of_request(request, facts["task"], facts["model"])
        # Arms of one policy differ in settings: each is counted against full retention on its own.
        arms: dict[tuple[str, str, str], list[Judged]] = {}
        for row in rows:
            if row["experiment"] == name and (name, row["policy"]) not in CHANGED:
                arm = row["policy"], row["settings"], row["budget"]
                verdict = None if row["infeasible"] else bool(row["correct"])
                arms.setdefault(arm, []).append(
                    Judged(row["episode"], arm[0], arm[2], verdict, row["infeasible"])
                )
        full = [replace(each, budget=ANY) for each in arms.pop(("full", "{}", "1"))]
        yield from count(searched, full, {}, f"{QUALITY}: {name}")
        for arm, own in arms.items():
            kind, text, budget = arm
            policy = build(kind, json.loads(text))
            cells = {(kind, budget): resolved(policy)}
            made = MASKED * ((name, *arm) in masked)
            found = count(searched, [*full, *own], cells, f"{QUALITY}: {name}{made}")
            (row,) = (each for each in found if each.policy == kind)
            yield row if policy.uses_budget else replace(row, budget=ANY)


def validations() -> Iterator[Counted]:
    """Of validations, with the attention that replays of the same problems keep."""
    for path in sorted((ROOT / "reports/validation").glob("*/*/results.parquet")):
        found, request = read_results(path)
        if len({check.episode for check in found.checks}) < LEAST_PROBLEMS:
            continue
        name = path.parent.name
        searched = Searched.of_request(request, request["task"], found.about["model"])
        settings = {
            (cell["policy"], cell["budget"]): defaults_of(cell["policy"])
            | {RENAMED.get(key, key): value for key, value in cell["settings"].items()}
            for cell in request["cells"]
        }
        checks = [check for check in found.checks if (name, check.policy) not in CHANGED]
        judged = [
            Judged(check.episode, check.policy, check.budget,
                   bool(check.correct) if check.correct >= 0 else None, bool(check.infeasible))
            for check in checks
        ]  # fmt: skip
        for row in count(searched, judged, settings, str(path.relative_to(ROOT))):
            cell = row.policy, row.budget
            kept = [c.attention_kept for c in checks if (c.policy, c.budget) == cell]
            yield replace(row, attention_kept=sum(kept) / len(kept))


def main() -> None:
    rows = [*quality(), *validations()]
    OUT.write_text(to_csv(rows), encoding="utf-8")
    print(f"{OUT.relative_to(ROOT)}: {len(rows)} settings")


if __name__ == "__main__":
    main()
