"""`arborsim generate`: a trace of searches, or a bank of thoughts, drawn from distributions."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from arborsim.core.errors import UsageError
from arborsim.products.command import command, option, panel
from arborsim.products.options import command_line
from arborsim.report.progress import PatientProgress

if TYPE_CHECKING:
    from arborsim.products.generate.lengths import TreeSpec
    from arborsim.products.generate.synthetic import BankSpec, Dense
    from arborsim.searches.arms import Recipe

bank_option = panel("Banks (for arborsim search)")
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
        from arborsim.products.generate.lengths import TreeSpec, parse_counts

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


@dataclass(frozen=True)
class BankOptions:
    """Thoughts that several searches can be run on: what they are worth, and what they mean."""

    bank: bool = bank_option(
        False,
        "Draw thoughts for searches to walk later, with rewards, meanings and answers.",
        "--bank",
    )
    for_: str = bank_option(
        "", "Hold only what these searches ask for, e.g. rebase,ets.", "--for",
        shown="--first and --branching children", complete="algorithm",
    )  # fmt: skip
    width: str = bank_option("", "Widths of --for.", shown="16")
    set_: list[str] = bank_option([], "An option of --for, name=value; repeatable.", "--set")
    keep_duplicates: bool = bank_option(
        False, "Searches of --for go on with thoughts that repeat a sibling.", "--keep-duplicates"
    )
    reward_correlation: float = bank_option(0.8, "Of a reward with the parent's.")
    reward_spread: float = bank_option(1.0, "Rewards lie this wide around 0.5.")
    truth: float = bank_option(0.5, "Correlation of last rewards with right answers (biserial).")
    right: float = bank_option(0.5, "Share of answers that are right.")
    difficulty: float = bank_option(0.3, "Share of what makes an answer right that is the problem.")
    wrong_answers: int = bank_option(8, "Different wrong answers of a problem.")
    meanings: int = bank_option(4, "Different things that siblings say; 0: each its own.")
    common: float = bank_option(0.5, "Share of meanings that all thoughts of a level may have.")
    repeated: float = bank_option(0.0, "Share of siblings that repeat an older one word for word.")

    def spec(self, trees: TreeOptions) -> BankSpec:
        """Raises `UsageError` for what is no distribution or share, or not part of a bank."""
        from arborsim.products.generate.lengths import parse_counts
        from arborsim.products.generate.synthetic import BankSpec

        for name in ("pruned", "parallel", "rewards", "solved"):
            if getattr(trees, name) != getattr(TreeOptions(), name):
                raise UsageError(
                    f"--{name} is what one search does: leave it out with --bank (its searches "
                    "decide; --right says how many answers are right)"
                )
        own = {f.name for f in fields(BankSpec)} & {f.name for f in fields(self)}
        return BankSpec(
            parse_counts(trees.prompt_tokens, "--prompt-tokens"),
            parse_counts(trees.thought_tokens, "--thought-tokens"),
            parse_counts(trees.depth, "--depth"),
            _shares(trees.finished, "--finished"),
            **{name: getattr(self, name) for name in own},
        )

    def recipe(self, trees: TreeOptions) -> Recipe | Dense:
        """What the bank is to hold."""
        from arborsim.products.choices import names, whole_numbers
        from arborsim.products.generate.lengths import parse_counts
        from arborsim.products.generate.synthetic import Dense
        from arborsim.searches.arms import recipe_for

        if not self.for_:
            for name in ("width", "set_", "keep_duplicates"):
                if getattr(self, name):
                    raise UsageError(f"--{name.strip('_').replace('_', '-')} needs --for")
            branching = parse_counts(trees.branching, "--branching")
            first = parse_counts(trees.first, "--first") if trees.first else branching
            return Dense(first, branching)
        if trees.first or trees.branching != TreeOptions().branching:
            raise UsageError(
                "--for holds what its searches ask for: leave out --branching, --first"
            )
        widths = whole_numbers(self.width or "16", "--width")
        return recipe_for(names(self.for_), widths, self.set_, not self.keep_duplicates)


@command
def generate(
    out: Path = option(..., "The trace to make.", writes=True),
    trees: TreeOptions = TreeOptions(),
    searches: int = option(100, "How many searches.", min=1, max=10_000_000),
    seed: int = option(0, "Of all draws; search i depends on it and i.", min=0),
    model: str = option(
        "llama-3.1-8b", "Geometry to charge for: a name, or a config.json.", complete="model"
    ),
    overwrite: bool = option(False, "Replace the trace.", "--overwrite"),
    bank: BankOptions = BankOptions(),
) -> None:
    """Make a trace of searches drawn from distributions of lengths and trees.

    It holds structure and lengths, no signals: policies that read none can be replayed on it. With
    --bank it holds thoughts that several searches can be run on.
    """
    from arborsim.machine.lookup import load_geometry
    from arborsim.products.generate.lengths import write_generated
    from arborsim.products.generate.synthetic import write_synthetic
    from arborsim.trace.importers.sources import check_out

    check_out(out, overwrite)
    geometry = load_geometry(model)
    if not bank.bank and bank != BankOptions():
        unchanged = vars(BankOptions())
        name = next(name for name, value in vars(bank).items() if value != unchanged[name])
        raise UsageError(f"--{name.strip('_').replace('_', '-')} needs --bank")
    with PatientProgress(searches) as progress:
        rest = (searches, seed, geometry, out, overwrite, command_line(),
                lambda what, units: progress.advance(what, 1))  # fmt: skip
        if bank.bank:
            tokens = write_synthetic(bank.spec(trees), bank.recipe(trees), *rest)
        else:
            tokens = write_generated(trees.spec(), *rest)
    held = "problems" if bank.bank else "searches"
    typer.echo(f"wrote {out}: {searches:,} {held}, {tokens:,} tokens; no signals, no seconds")


def _shares(text: str, option: str) -> tuple[float, ...]:
    """``"0.5,0.75"`` as numbers; `TreeSpec` checks their range."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"{option} {text:.40}: expected a share (0.5), or one per level (0.5,0.75)"
        ) from None
