"""`arborsim generate`: searches of stated lengths and trees, as a trace."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arborsim.cli.command import command, option
from arborsim.cli.options import command_line
from arborsim.cli.progress import PatientProgress
from arborsim.core.errors import UsageError

if TYPE_CHECKING:
    from arborsim.plan.generate import TreeSpec


class Rewards(StrEnum):
    none = "none"
    uniform = "uniform"


@dataclass(frozen=True)
class TreeOptions:
    """The lengths and trees that searches are drawn from."""

    prompt_tokens: Annotated[
        str,
        option(
            "Tokens of a prompt: 1024, uniform:low=64,high=512, "
            "lognormal:median=200,sigma=0.6[,most=4096] or file:NAME (one number a line)."
        ),
    ] = "lognormal:median=512,sigma=0.8,most=8192"
    thought_tokens: Annotated[str, option("Tokens of a thought.")] = (
        "lognormal:median=128,sigma=0.6,most=2048"
    )
    depth: Annotated[str, option("Levels of thoughts.")] = "8"
    branching: Annotated[str, option("Children of a block that is expanded.")] = "1"
    first: Annotated[str, option("Children of the prompt.", default="as --branching")] = ""
    pruned: Annotated[
        str, option("Share of each level given up; 0.5,0.75: per level, last one stays.")
    ] = "0"
    finished: Annotated[
        str, option("Share of what stays that has an answer and is not expanded.")
    ] = "0"
    parallel: Annotated[
        int, option("Most thoughts decoded side by side.", default="a whole level", min=0)
    ] = 0
    rewards: Annotated[Rewards, option("uniform: the lowest of drawn rewards are given up.")] = (
        Rewards.none
    )
    solved: Annotated[
        float | None, option("Share of searches with a correct answer.", default="not judged")
    ] = None

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
    out: Annotated[Path, option("The trace to make.")],
    trees: TreeOptions = TreeOptions(),
    searches: Annotated[int, option("How many searches.", min=1)] = 100,
    seed: Annotated[int, option("Of all draws; search i depends on it and i.", min=0)] = 0,
    model: Annotated[
        str, option("Geometry to charge for: a name, or a config.json.", complete="model")
    ] = "llama-3.1-8b",
    overwrite: Annotated[bool, option("Replace the trace.", "--overwrite")] = False,
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
    """``"0.5,0.75"`` as numbers; their range is the distribution's matter."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"{option} {text:.40}: expected a share (0.5), or one per level (0.5,0.75)"
        ) from None
