"""Right answers that others counted, on their models and engines, of policies that are here too.

``outside.csv`` has a row per arm, with the repository, commit and file that it was taken from.
They stand next to replays as what they are: other models, other problems, absolute budgets.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources

from arborsim.core.statistics import clopper_pearson
from arborsim.play.results import BASELINE


@dataclass(frozen=True)
class Outside:
    """One arm: a policy at a budget, on a model and its problems."""

    model: str
    dataset: str
    policy: str  #: as it is called here
    settings: str  #: those that differ from its authors' usual form
    budget_tokens: int  #: 0 under full retention
    n: int  #: problems
    right_percent: float
    mean_output_tokens: float
    full_percent: float  #: right under full retention in the same run
    full_output_tokens: float
    source: str  #: repository, commit and file

    @property
    def share(self) -> float:
        """The budget as a share of what full retention wrote, prompts left out."""
        return self.budget_tokens / self.full_output_tokens

    @property
    def interval(self) -> tuple[float, float]:
        """Clopper and Pearson's, 95%, of the share of right answers."""
        return clopper_pearson(round(self.n * self.right_percent / 100), self.n)

    @property
    def longer(self) -> float:
        """Length of its answers, as a multiple of full retention's."""
        return self.mean_output_tokens / self.full_output_tokens

    @property
    def told(self) -> str:
        """``"512 tokens: 6.7% (95% interval 0.8 to 22.1), answers 1.47 times as long"``."""
        low, high = self.interval
        named = f"{self.budget_tokens:,} tokens{', ' if self.settings else ''}{self.settings}"
        return (
            f"{named}: {self.right_percent:.1f}% (95% interval {100 * low:.1f} to "
            f"{100 * high:.1f}), answers {self.longer:.2f} times as long"
        )


@cache
def outside_answers() -> tuple[Outside, ...]:
    """All arms with a budget, each with full retention of the same run."""
    text = (resources.files("arborsim.products.replay") / "outside.csv").read_text("utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    full = {(r["model"], r["dataset"]): r for r in rows if r["policy"] == BASELINE}
    return tuple(
        _arm(row, full[row["model"], row["dataset"]]) for row in rows if row["budget_tokens"]
    )


def _arm(row: dict[str, str], full: dict[str, str]) -> Outside:
    mix, interval = float(row["mix_lambda"]), int(row["buffer_tokens"])
    said = ["importance alone"] * math.isclose(mix, 1) + [f"interval {interval}"] * (
        interval != 128
    )
    return Outside(
        row["model"],
        row["dataset"],
        row["policy"],
        ", ".join(said),
        int(row["budget_tokens"]),
        int(row["n"]),
        float(row["right_percent"]),
        float(row["mean_output_tokens"]),
        float(full["right_percent"]),
        float(full["mean_output_tokens"]),
        row["source"],
    )


def counted_by_others(policies: Collection[str]) -> Iterator[str]:
    """A line per model and problems on which others counted answers of these policies."""
    runs: dict[tuple[str, str, str], list[Outside]] = {}
    for each in outside_answers():
        if each.policy in policies:
            runs.setdefault((each.policy, each.model, each.dataset), []).append(each)
    for (policy, model, dataset), own in runs.items():
        first = own[0]
        low, high = clopper_pearson(round(first.n * first.full_percent / 100), first.n)
        arms = "; ".join(each.told for each in own)
        yield (
            f"Counted by others: {policy} on {model}, {dataset}, n {first.n}: full retention "
            f"{first.full_percent:.1f}% (95% interval {100 * low:.1f} to {100 * high:.1f}); "
            f"{arms}. From {first.source}."
        )
