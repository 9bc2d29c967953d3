"""`arborsim record`: run searches on a live model and store them as a trace."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import typer

from arborsim.core.outputs import check_writable
from arborsim.products.command import command, option, panel
from arborsim.products.interrupt import interrupted
from arborsim.products.options import search_help
from arborsim.products.record.problem_options import (
    RewardedProblems,
    problem_option,
    search_option,
)

capture_option, bank_option = panel("What is stored"), panel("Banks (for arborsim search)")
CaptureLevel = StrEnum("CaptureLevel", ["tree", "signals", "qkv"])
Attention = StrEnum("Attention", ["auto", "dense", "sparse"])


@dataclass(frozen=True)
class RecordedProblems(RewardedProblems):
    """Problems, the model that solves them, and one search, which is a line by default."""

    model: str = problem_option(
        "",
        "chain, game24, tail or tail-deep (shipped), a folder with safetensors, or a model id.",
        shown="the task's, or chain",
    )
    search: str = search_option("linear", search_help(), complete="algorithm")
    teacher_forced: Path | None = problem_option(
        None,
        'Record tokens that any engine generated: JSON lines, each {"prompt": ..., "tokens": ...}, '
        'text or ids, and if known "thoughts" (their ends) and "correct".',
    )


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

    def fields(self) -> dict[str, Any]:
        """As arguments of `arborsim.record`."""
        named = {"for_": "algorithms", "width": "widths"}
        return {named.get(name, name): value for name, value in vars(self).items()}


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

    def fields(self) -> dict[str, Any]:
        """As arguments of `arborsim.record`."""
        return {name: getattr(value, "value", value) for name, value in vars(self).items()}


@command
def record(
    out: Path = option(..., "The trace to make.", writes=True),
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
    from arborsim.products.live.ask import described
    from arborsim.products.record.ask import Recording

    check_writable(out, "--out")
    recording = Recording(
        out, **problems.fields(), settings=set_, **capture.fields(), **bank.fields(),
        overwrite=overwrite, resume=resume,
    )  # fmt: skip
    try:
        recording.run(progress=True)
    except KeyboardInterrupt:
        seen = recording.seen
        if not seen.episode:
            return interrupted(": no episode was complete, so nothing was written")
        kept = f"{seen.episode} whole episodes (of {seen.episodes})"
        return interrupted(f": {out} holds {kept}; --resume goes on")
    typer.echo(f"{out}: {recording.seen.episode} episodes, {recording.described()}")
    for line in described(recording.seen.models):
        typer.echo(line)
    return 0
