"""``arborsim record``: run a search on a live model and store what happened as a trace."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arborsim.cli.command import command, option, panel
from arborsim.cli.options import check_output, command_line, names
from arborsim.cli.problems import (
    RewardedProblems,
    describe_usage,
    problem_option,
    search_option,
)
from arborsim.cli.progress import LiveBar
from arborsim.core.errors import UsageError
from arborsim.search import search_names

if TYPE_CHECKING:
    from arborsim.bank.arms import Recipe
    from arborsim.live.backends import LayerChoice, RecordProgress, RecordRequest

capture_option, bank_option = panel("What is stored"), panel("Banks (for arborsim search)")


class _Capture(StrEnum):
    tree = "tree"
    signals = "signals"
    qkv = "qkv"


class _Attention(StrEnum):
    auto = "auto"
    dense = "dense"
    sparse = "sparse"


@dataclass(frozen=True)
class RecordedProblems(RewardedProblems):
    """Problems, the model that solves them, and one search, which is a line by default."""

    model: Annotated[
        str, problem_option("chain or game24 (shipped), a folder with safetensors, or a model id.")
    ] = "chain"
    search: Annotated[str, search_option(", ".join(search_names()) + ".", complete="algorithm")] = (
        "linear"
    )


@dataclass(frozen=True)
class BankOptions:
    """A tree that several searches can be run on later."""

    bank: Annotated[
        bool,
        bank_option(
            "Grow a tree that searches can be run on later, instead of running --search.", "--bank"
        ),
    ] = False
    children: Annotated[str, bank_option("Per node, or per depth: 8 or 64,16,8.")] = ""
    depth: Annotated[int, bank_option("Levels.", default="one per entry of --children", min=0)] = 0
    for_: Annotated[
        str,
        bank_option(
            "Grow only what these searches ask for, e.g. rebase,ets or all.",
            "--for",
            complete="algorithm",
        ),
    ] = ""
    width: Annotated[str, bank_option("Widths of --for.", default="16")] = ""
    batch: Annotated[int, bank_option("Thoughts that are drawn at once.", default="256", min=0)] = 0

    def recipe(self, problems: RecordedProblems, settings: list[str]) -> Recipe | None:
        """What a bank is to hold; None if none was asked for.

        Raises
        ------
        UnknownName, UsageError
            Options exclude each other, a search or an option is unknown, or the tree is too large.
        """
        from arborsim.bank.arms import BATCH, Recipe, recipe_for
        from arborsim.cli.search import widths_of

        if not self.bank:
            self._refuse_alone()
            return None
        self._check(problems, settings)
        batch = self.batch or BATCH
        if self.for_:
            widths = widths_of(self.width or "16")
            dedupe = not problems.keep_duplicates
            return recipe_for(names(self.for_), widths, settings, dedupe, batch)
        counts = _counts(self.children)
        if len(counts) == 1 and self.depth == 0:
            raise UsageError(f"--children {self.children} needs --depth, e.g. --depth 3")
        recipe = Recipe(children=counts, depth=self.depth, batch=batch)
        recipe.make()  # refuses a tree that is too large
        return recipe

    def _refuse_alone(self) -> None:
        given = {"--children": self.children, "--depth": self.depth, "--for": self.for_,
                 "--width": self.width, "--batch": self.batch}  # fmt: skip
        for name, value in given.items():
            if value:
                raise UsageError(f"{name} is about banks: add --bank, or leave it out")

    def _check(self, problems: RecordedProblems, settings: list[str]) -> None:
        """Refuse what contradicts: a bank serves any search, or those that it names."""
        if problems.search != "linear":
            raise UsageError(
                f"--bank serves searches later: --for {problems.search} instead of --search"
            )
        if problems.temperature == 0:
            raise UsageError(
                "--bank at --temperature 0 would draw the same thought again and again"
            )
        if bool(self.children) == bool(self.for_):
            raise UsageError(
                "--bank needs either --children (e.g. 8 with --depth 3, or 64,16,8) or --for with "
                "--width (e.g. --for rebase,ets --width 16,64)"
            )
        if self.for_ and self.depth:
            raise UsageError("--depth goes with --children: searches go as deep as they like")
        for name, value in (("--width", self.width), ("--set", settings)):
            if self.children and value:
                raise UsageError(f"{name} goes with --for: --children serves any search")


@dataclass(frozen=True)
class CaptureOptions:
    """What a trace holds of a search."""

    capture: Annotated[
        _Capture | None,
        capture_option("tree, signals or qkv.", default="signals; of a bank: tree and embeddings"),
    ] = None
    attention: Annotated[
        _Attention, capture_option("auto: whole rows for paths up to 4096 tokens.")
    ] = _Attention.auto
    attention_top: Annotated[int, capture_option("Positions per sparse row.", min=1)] = 256
    qkv_layers: Annotated[str, capture_option("Layers of --capture qkv, e.g. 2,3, or all.")] = ""
    attention_layers: Annotated[
        str,
        capture_option(
            "Also store these layers' own rows, mean and variance over heads: 2,3 or all."
        ),
    ] = ""

    def request(self, *, bank: bool) -> dict[str, Any]:
        """As the fields of a `RecordRequest`."""
        from arborsim.trace.schema import Capture

        capture = self.capture or (_Capture.tree if bank else _Capture.signals)
        return {
            "capture": Capture(capture.value),
            "attention": self.attention.value,
            "attention_top": self.attention_top,
            "qkv_layers": _layers("--qkv-layers", self.qkv_layers),
            "attention_layers": _layers("--attention-layers", self.attention_layers),
        }


@command
def record(
    out: Annotated[Path, option("The trace to make.")],
    overwrite: Annotated[bool, option("Replace the file.", "--overwrite")] = False,
    resume: Annotated[bool, option("Go on after an interruption.", "--resume")] = False,
    problems: RecordedProblems = RecordedProblems(),
    set_: Annotated[
        list[str], search_option("An option of the search, name=value; repeatable.", "--set")
    ] = [],
    capture: CaptureOptions = CaptureOptions(),
    bank: BankOptions = BankOptions(),
) -> int:
    """Run searches on a live model and record them.

    Ctrl-C stops after the last whole episode, leaves a valid trace, and exits with code 130.
    """
    from arborsim.live.backends import RecordRequest

    check_output(out, "--out")
    recipe = bank.recipe(problems, set_)
    fields = problems.request() | capture.request(bank=bank.bank)
    if bank.bank and problems.temperature is None:
        fields["temperature"] = 1.0
    request = RecordRequest(
        **fields,
        out=out,
        search_options={} if bank.bank else _settings(set_),
        bank=recipe,
        overwrite=overwrite,
        resume=resume,
        command=command_line(),
    )
    return _run(request)


def _run(request: RecordRequest) -> int:
    """Record with a bar on standard error; returns the exit code."""
    from arborsim.live.backends import RecordProgress, get_backend

    backend = get_backend("torch")
    seen = RecordProgress(0, 0, 0, 0, 0, 0.0)
    bank = request.bank is not None
    with LiveBar("recording", time_left=True) as bar:

        def show(progress: RecordProgress) -> None:
            nonlocal seen
            seen = progress
            bar.show(_describe(seen, bank), completed=seen.episode, total=seen.episodes)

        try:
            seen = backend.record(request, show)
        except KeyboardInterrupt:
            bar.stop()
            left = (
                f"{request.out} holds {seen.episode} whole episodes (of {seen.episodes}); "
                "--resume goes on"
                if seen.episode
                else "no episode was complete, so nothing was written"
            )
            typer.echo(f"arborsim: interrupted: {left}", err=True)
            return 130
    typer.echo(f"{request.out}: {seen.episode} episodes, {_describe(seen, bank)}")
    for usage in seen.models:
        typer.echo(describe_usage(usage))
    return 0


def _describe(progress: RecordProgress, bank: bool) -> str:
    """Accuracy so far (of a bank: problems that some thought solves) and speed, in words."""
    verdict = f"{progress.correct}/{progress.judged} {'solvable' if bank else 'correct'}, "
    thoughts = f"{progress.thoughts} thoughts, " if bank else ""
    speed = f"{progress.tokens} tokens, {progress.tokens_per_s:.0f} tokens/s"
    return f"{verdict if progress.judged else ''}{thoughts}{speed}"


def _settings(given: list[str]) -> dict[str, str]:
    options = {}
    for setting in given:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise UsageError(f"--set {setting}: expected name=value")
        options[name.strip()] = value.strip()
    return options


def _layers(option: str, text: str) -> LayerChoice:
    if not text:
        return ()
    if text == "all":
        return "all"
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise UsageError(f"{option} {text}: expected numbers, e.g. 2,3, or all") from None


def _counts(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"--children {text}: expected whole numbers of 1 or more, by comma")
    return tuple(map(int, parts))
