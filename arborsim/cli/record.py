"""`arborsim record`: run searches on a live model and store them as a trace."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from arborsim.api.choices import assigned, names, whole_numbers
from arborsim.cli.command import command, option, panel
from arborsim.cli.options import check_output, command_line, search_help
from arborsim.cli.problems import (
    RewardedProblems,
    describe_usage,
    problem_option,
    search_option,
    split_settings,
)
from arborsim.cli.progress import interrupted
from arborsim.core.errors import UsageError
from arborsim.show.progress import LiveBar

if TYPE_CHECKING:
    from arborsim.bank.arms import Recipe
    from arborsim.live.backends import LayerChoice, RecordProgress, RecordRequest

capture_option, bank_option = panel("What is stored"), panel("Banks (for arborsim search)")
CaptureLevel = StrEnum("CaptureLevel", ["tree", "signals", "qkv"])
Attention = StrEnum("Attention", ["auto", "dense", "sparse"])


@dataclass(frozen=True)
class RecordedProblems(RewardedProblems):
    """Problems, the model that solves them, and one search, which is a line by default."""

    model: str = problem_option(
        "chain", "chain or game24 (shipped), a folder with safetensors, or a model id."
    )
    search: str = search_option("linear", search_help(), complete="algorithm")
    teacher_forced: Path | None = problem_option(
        None,
        'Record tokens that any engine generated: JSON lines, each {"prompt": ..., "tokens": ...}, '
        'text or ids, and if known "thoughts" (their ends) and "correct".',
    )

    def check(self, *, bank: bool) -> None:
        """Refuse what contradicts given tokens."""
        given = {"--prompts": self.prompts is not None, "--bank": bank,
                 "--search": self.search != "linear", "--temperature": self.temperature is not None,
                 "--top-p": self.top_p < 1, "--max-tokens": self.max_tokens > 0,
                 "--reward": bool(self.reward)}  # fmt: skip
        if self.teacher_forced is None:
            return
        for name, value in given.items():
            if value:
                raise UsageError(f"--teacher-forced records tokens as they are: leave out {name}")


@dataclass(frozen=True)
class BankOptions:
    """A tree that several searches can be run on later."""

    bank: bool = bank_option(
        False,
        "Grow a tree that searches can be run on later, instead of running --search.",
        "--bank",
    )
    children: str = bank_option("", "Per node, or per depth: 8 or 64,16,8.")
    depth: int = bank_option(0, "Levels.", shown="one per entry of --children", min=0)
    for_: str = bank_option(
        "", "Grow only what these searches ask for, e.g. rebase,ets or all.", "--for",
        complete="algorithm",
    )  # fmt: skip
    width: str = bank_option("", "Widths of --for.", shown="16")
    batch: int = bank_option(
        0, "Problems recorded together; with --bank thoughts drawn at once.", shown="1, 256", min=0
    )

    def recipe(self, problems: RecordedProblems, settings: list[str]) -> Recipe | None:
        """What to grow; None unless ``--bank`` was given."""
        from arborsim.bank.arms import BATCH, Recipe, recipe_for

        if not self.bank:
            given = {"--children": self.children, "--depth": self.depth, "--for": self.for_,
                     "--width": self.width}  # fmt: skip
            for name, value in given.items():
                if value:
                    raise UsageError(f"{name} is about banks: add --bank, or leave it out")
            return None
        self._check(problems, settings)
        batch = self.batch or BATCH
        if self.for_:
            widths = list(dict.fromkeys(whole_numbers(self.width or "16", "--width")))
            dedupe = not problems.keep_duplicates
            return recipe_for(names(self.for_), widths, settings, dedupe, batch)
        counts = tuple(whole_numbers(self.children, "--children"))
        if len(counts) == 1 and self.depth == 0:
            raise UsageError(f"--children {self.children} needs --depth, e.g. --depth 3")
        recipe = Recipe(children=counts, depth=self.depth, batch=batch)
        recipe.make()  # refuses a tree that is too large
        return recipe

    def _check(self, problems: RecordedProblems, settings: list[str]) -> None:
        """Refuse contradictions: a bank serves any search, or those that it names."""
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

    capture: CaptureLevel | None = capture_option(
        None, "tree, signals or qkv.", shown="signals; of a bank: tree and embeddings"
    )
    attention: Attention = capture_option(
        Attention.auto, "auto: whole rows for paths up to 4096 tokens."
    )
    attention_top: int = capture_option(256, "Positions per sparse row.", min=1)
    qkv_layers: str = capture_option("", "Layers of --capture qkv, e.g. 2,3, or all.")
    attention_layers: str = capture_option(
        "", "Also store these layers' own rows, mean and variance over heads: 2,3 or all."
    )
    hidden_layers: str = capture_option(
        "", "Also store the outputs of these layers, 2 bytes per number: 2,3 or all."
    )

    def request(self, *, bank: bool) -> dict[str, Any]:
        """As the fields of a `RecordRequest`."""
        from arborsim.trace.schema import Capture

        capture = self.capture or (CaptureLevel.tree if bank else CaptureLevel.signals)
        return {
            "capture": Capture(capture.value),
            "attention": self.attention.value,
            "attention_top": self.attention_top,
            "qkv_layers": _layers("--qkv-layers", self.qkv_layers),
            "attention_layers": _layers("--attention-layers", self.attention_layers),
            "hidden_layers": _layers("--hidden-layers", self.hidden_layers),
        }


@command
def record(
    out: Path = option(..., "The trace to make."),
    overwrite: bool = option(False, "Replace the file.", "--overwrite"),
    resume: bool = option(False, "Go on after an interruption.", "--resume"),
    problems: RecordedProblems = RecordedProblems(),
    set_: list[str] = search_option(
        [], "An option of the search, name=value; repeatable.", "--set"
    ),
    capture: CaptureOptions = CaptureOptions(),
    bank: BankOptions = BankOptions(),
) -> int:
    """Run searches on a live model and record them.

    Ctrl-C stops after the last whole episode, leaves a valid trace, and exits with code 130.
    """
    from arborsim.live.backends import RecordRequest

    check_output(out, "--out")
    problems.check(bank=bank.bank)
    if problems.teacher_forced is not None and bank.batch:
        raise UsageError("--teacher-forced computes one chain after the other: leave out --batch")
    recipe = bank.recipe(problems, set_)
    fields = problems.request() | capture.request(bank=bank.bank)
    if bank.bank and problems.temperature is None:
        fields["temperature"] = 1.0
    options: dict[str, str] = {}
    if not bank.bank:
        own, unknown = split_settings(set_, problems.search, ())
        options = own | dict(map(assigned, unknown))  # what it lacks, the search refuses by name
    return _run(RecordRequest(
        **fields, out=out, search_options=options, bank=recipe, overwrite=overwrite, resume=resume,
        batch=1 if bank.bank else max(1, bank.batch), teacher_forced=problems.teacher_forced,
        command=command_line(),
    ))  # fmt: skip


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
            if not seen.episode:
                return interrupted(": no episode was complete, so nothing was written")
            kept = f"{seen.episode} whole episodes (of {seen.episodes})"
            return interrupted(f": {request.out} holds {kept}; --resume goes on")
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


def _layers(option: str, text: str) -> LayerChoice:
    if not text:
        return ()
    if text == "all":
        return "all"
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise UsageError(f"{option} {text}: expected numbers, e.g. 2,3, or all") from None
