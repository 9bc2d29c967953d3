"""`arborsim generate`: a trace of searches drawn from distributions of lengths and trees."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from arborsim.cli.command import command, option
from arborsim.cli.options import command_line
from arborsim.core.errors import UsageError
from arborsim.show.progress import PatientProgress

if TYPE_CHECKING:
    from arborsim.plan.generate import TreeSpec

Rewards = StrEnum("Rewards", ["none", "uniform"])


@dataclass(frozen=True)
class TreeOptions:
    """The lengths and trees that searches are drawn from."""

    prompt_tokens: str = option(
        "lognormal:median=512,sigma=0.8,most=8192",
        "Tokens of a prompt: 1024, uniform:low=64,high=512, "
        "lognormal:median=200,sigma=0.6[,most=4096] or file:NAME (one number a line).",
    )
    thought_tokens: str = option("lognormal:median=128,sigma=0.6,most=2048", "Tokens of a thought.")
    depth: str = option("8", "Levels of thoughts.")
    branching: str = option("1", "Children of a block that is expanded.")
    first: str = option("", "Children of the prompt.", shown="as --branching")
    pruned: str = option("0", "Share of each level given up; 0.5,0.75: per level, last one stays.")
    finished: str = option("0", "Share of what stays that has an answer and is not expanded.")
    parallel: int = option(0, "Most thoughts decoded side by side.", shown="a whole level", min=0)
    rewards: Rewards = option(Rewards.none, "uniform: the lowest of drawn rewards are given up.")
    solved: float | None = option(
        None, "Share of searches with a correct answer.", shown="not judged"
    )

    def spec(self) -> TreeSpec:
        """Raises `UsageError` for what is no distribution or share."""
        from arborsim.plan.generate import TreeSpec, parse_counts

        return TreeSpec(
            parse_counts(self.prompt_tokens, "--prompt-tokens"),
            parse_counts(self.thought_tokens, "--thought-tokens"),
            parse_counts(self.depth, "--depth"),
            parse_counts(self.branching, "--branching"),
            parse_counts(self.first, "--first") if self.first else None,
            _shares(self.pruned, "--pruned"),
            _shares(self.finished, "--finished"),
            self.parallel,
            self.rewards is Rewards.uniform,
            self.solved,
        )


@command
def generate(
    out: Path = option(..., "The trace to make."),
    trees: TreeOptions = TreeOptions(),
    searches: int = option(100, "How many searches.", min=1),
    seed: int = option(0, "Of all draws; search i depends on it and i.", min=0),
    model: str = option(
        "llama-3.1-8b", "Geometry to charge for: a name, or a config.json.", complete="model"
    ),
    overwrite: bool = option(False, "Replace the trace.", "--overwrite"),
) -> None:
    """Make a trace of searches drawn from distributions of lengths and trees.

    It holds structure and lengths, no signals: policies that read none can be replayed on it.
    """
    from arborsim.machine.lookup import load_geometry
    from arborsim.plan.generate import write_generated
    from arborsim.trace.importers.sources import check_out

    check_out(out, overwrite)
    spec, geometry = trees.spec(), load_geometry(model)
    with PatientProgress(searches) as progress:
        tokens = write_generated(
            spec, searches, seed, geometry, out, overwrite, command_line(),
            lambda what, units: progress.advance(what, 1),
        )  # fmt: skip
    typer.echo(f"wrote {out}: {searches:,} searches, {tokens:,} tokens; no signals, no seconds")


def _shares(text: str, option: str) -> tuple[float, ...]:
    """``"0.5,0.75"`` as numbers; `TreeSpec` checks their range."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"{option} {text:.40}: expected a share (0.5), or one per level (0.5,0.75)"
        ) from None
