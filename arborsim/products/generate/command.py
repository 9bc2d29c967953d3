"""`arborsim generate`: a trace of searches, or a bank of thoughts, drawn from distributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Literal

from arborsim.core.errors import UsageError
from arborsim.products.declare import Count, Option, Options, Seed, Written
from arborsim.products.options import command_line
from arborsim.report.progress import PatientProgress

if TYPE_CHECKING:
    from arborsim.products.generate.lengths import TreeSpec
    from arborsim.products.generate.synthetic import BankSpec, Dense
    from arborsim.searches.arms import Recipe


@dataclass(frozen=True, kw_only=True)
class TreeOptions(Options):
    """The lengths and trees that searches are drawn from.

    Parameters
    ----------
    prompt_tokens
        Tokens of a prompt: 1024, uniform:low=64,high=512,
        lognormal:median=200,sigma=0.6[,most=4096] or file:NAME (one number a line).
    thought_tokens
        Tokens of a thought.
    depth
        Levels of thoughts.
    branching
        Children of a block that is expanded.
    first
        Children of the prompt.
    pruned
        Share of each level given up, or one per level: 0.5,0.75. The last one stays.
    finished
        Share of what stays that has an answer and is not expanded.
    parallel
        Most thoughts decoded side by side.
    rewards
        uniform: the lowest of drawn rewards are given up.
    solved
        Share of searches with a correct answer.
    """

    prompt_tokens: str = "lognormal:median=512,sigma=0.8,most=8192"
    thought_tokens: str = "lognormal:median=128,sigma=0.6,most=2048"
    depth: str = "8"
    branching: str = "1"
    first: Annotated[str, Option(shown="as --branching")] = ""
    pruned: str = "0"
    finished: str = "0"
    parallel: Annotated[Count, Option(shown="a whole level")] = 0
    rewards: Literal["none", "uniform"] = "none"
    solved: Annotated[float | None, Option(shown="not judged")] = None

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
            self.rewards == "uniform",
            self.solved,
        )


@dataclass(frozen=True, kw_only=True)
class BankOptions(Options, panel="Banks (for arborsim search)"):
    """Thoughts that several searches can be run on: what they are worth, and what they mean.

    Parameters
    ----------
    bank
        Draw thoughts for searches to walk later, with rewards, meanings and answers.
    for_
        Hold only what these searches ask for, e.g. rebase,ets.
    width
        Widths of --for.
    set_
        An option of --for, name=value. Repeatable.
    keep_duplicates
        Searches of --for go on with thoughts that repeat a sibling.
    reward_correlation
        Correlation of a reward with the parent's.
    reward_spread
        Rewards lie this wide around 0.5.
    truth
        Correlation of last rewards with right answers (biserial).
    right
        Share of answers that are right.
    difficulty
        Share of what makes an answer right that is the problem.
    wrong_answers
        Different wrong answers of a problem.
    meanings
        Different things that siblings say, or 0 for each its own.
    common
        Share of meanings that all thoughts of a level may have.
    repeated
        Share of siblings that repeat an older one word for word.
    """

    bank: bool = False
    for_: Annotated[str, Option(complete="algorithm", shown="--first and --branching children")] = (
        ""
    )
    width: Annotated[str, Option(shown="16")] = ""
    set_: Sequence[str] = ()
    keep_duplicates: bool = False
    reward_correlation: float = 0.8
    reward_spread: float = 1.0
    truth: float = 0.5
    right: float = 0.5
    difficulty: float = 0.3
    wrong_answers: int = 8
    meanings: int = 4
    common: float = 0.5
    repeated: float = 0.0

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
        """The recipe of the bank."""
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
        return recipe_for(names(self.for_), widths, list(self.set_), not self.keep_duplicates)


def generate(
    trees: TreeOptions,
    bank: BankOptions,
    *,
    out: Written,
    searches: Annotated[int, Option(least=1, most=10000000)] = 100,
    seed: Seed = 0,
    model: Annotated[str, Option(complete="model")] = "llama-3.1-8b",
    overwrite: bool = False,
) -> None:
    """Make a trace of searches drawn from distributions of lengths and trees.

    It holds structure and lengths, no signals: policies that read none can be replayed on it. With
    --bank it holds thoughts that several searches can be run on.

    Parameters
    ----------
    out
        The trace to make.
    searches
        How many searches.
    seed
        Seed of all draws. Search i depends on it and i.
    model
        Geometry to charge for: a name, or a config.json.
    overwrite
        Replace the trace.
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
    print(f"wrote {out}: {searches:,} {held}, {tokens:,} tokens; no signals, no seconds")


def _shares(text: str, option: str) -> tuple[float, ...]:
    """``"0.5,0.75"`` as numbers. `TreeSpec` checks their range."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"{option} {text:.40}: expected a share (0.5), or one per level (0.5,0.75)"
        ) from None
