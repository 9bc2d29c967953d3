"""`arborsim import`: recordings that others made become traces."""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arborsim.core.errors import UsageError

if TYPE_CHECKING:
    from arborsim.trace.importers.sources import Contents
    from arborsim.trace.importers.write import Description

import_ = typer.Typer(
    help="Make a trace of a recording in another format (structure and lengths).",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
)

_MOST_SHOWN = 10


class OnDamage(StrEnum):
    refuse = "refuse"
    skip = "skip"


LogArgument = Annotated[Path, typer.Argument(help="The recording.", show_default=False)]
OutArgument = Annotated[Path, typer.Argument(help="The trace to make.", show_default=False)]
LimitOption = Annotated[int, typer.Option(min=0, help="Items to read; 0: all.")]
DamageOption = Annotated[
    OnDamage, typer.Option(help="Damaged items: refuse the file, or skip and name them.")
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace the trace.")]
ModelOption = Annotated[
    str, typer.Option(help="Geometry to charge for: a name, or a config.json. None is recorded.")
]


@import_.command(short_help="Log of the tree-of-thoughts program (JSON).")
def tot(
    log: LogArgument,
    out: OutArgument,
    tokens_per_character: Annotated[
        float, typer.Option(help="Lengths of thoughts: the log has text, but no tokens.")
    ] = 0.62,
    prompt_tokens: Annotated[
        int, typer.Option(min=0, help="Length of the prompt; 0: of the problem's text.")
    ] = 0,
    value_scale: Annotated[float, typer.Option(help="Value that becomes reward 1.")] = 60.0,
    task: Annotated[str, typer.Option(help="Name of the task.")] = "game24",
    limit: LimitOption = 0,
    on_damage: DamageOption = OnDamage.refuse,
    overwrite: OverwriteOption = False,
    model: ModelOption = "llama-3.1-8b",
) -> None:
    """Log of the tree-of-thoughts program (JSON): states, proposals, values, verdicts."""
    from arborsim.trace.importers.sources import read_list
    from arborsim.trace.importers.trees import TotLog
    from arborsim.trace.importers.write import Description, check_out

    if not 0 < tokens_per_character <= 100:
        raise UsageError("--tokens-per-character is a number above 0, at most 100")
    if not 0 < value_scale < float("inf"):
        raise UsageError("--value-scale is a finite number above 0")
    check_out(out, overwrite)
    reading = TotLog(tokens_per_character, prompt_tokens, value_scale)
    contents = read_list(log, reading.search_of, limit)
    options = {"tokens_per_character": tokens_per_character, "value_scale": value_scale}
    if prompt_tokens:
        options["prompt_tokens"] = prompt_tokens
    lengths = f"characters x {tokens_per_character:g}, rounded"
    about = Description("tot", task, "tot-bfs", lengths, options, {})
    _write(log, out, contents, about, on_damage, overwrite, model)


@import_.command()
def deft(
    log: LogArgument,
    out: OutArgument,
    limit: LimitOption = 0,
    on_damage: DamageOption = OnDamage.refuse,
    overwrite: OverwriteOption = False,
    model: ModelOption = "llama-3.1-8b",
) -> None:
    """DeFT's reasoning trees (JSON): tokens per node."""
    from arborsim.trace.importers.sources import read_list
    from arborsim.trace.importers.trees import deft_search
    from arborsim.trace.importers.write import NO_ENDS, Description, check_out

    check_out(out, overwrite)
    contents = read_list(log, deft_search, limit)
    about = Description("deft", "reasoning trees", "level by level", "the source's", {}, NO_ENDS)
    _write(log, out, contents, about, on_damage, overwrite, model)


@import_.command(short_help="Mooncake's requests (JSON lines), 512-token prefix blocks.")
def mooncake(
    log: LogArgument,
    out: OutArgument,
    limit: LimitOption = 0,
    on_damage: DamageOption = OnDamage.refuse,
    overwrite: OverwriteOption = False,
    model: ModelOption = "llama-3.1-8b",
) -> None:
    """Mooncake's requests (JSON lines): arrivals in ms, 512-token prefix blocks."""
    _requests("mooncake", log, out, limit, on_damage, overwrite, model)


@import_.command(short_help="Qwen-Bailian's requests (JSON lines), 16-token blocks.")
def bailian(
    log: LogArgument,
    out: OutArgument,
    limit: LimitOption = 0,
    on_damage: DamageOption = OnDamage.refuse,
    overwrite: OverwriteOption = False,
    model: ModelOption = "llama-3.1-8b",
) -> None:
    """Qwen-Bailian's requests (JSON lines): arrivals in s, 16-token prefix blocks."""
    _requests("bailian", log, out, limit, on_damage, overwrite, model)


@import_.command()
def azure(
    log: LogArgument,
    out: OutArgument,
    limit: LimitOption = 0,
    on_damage: DamageOption = OnDamage.refuse,
    overwrite: OverwriteOption = False,
    model: ModelOption = "llama-3.1-8b",
) -> None:
    """Azure's requests (CSV): arrivals and lengths."""
    _requests("azure", log, out, limit, on_damage, overwrite, model)


def _requests(
    name: str,
    log: Path,
    out: Path,
    limit: int,
    on_damage: OnDamage,
    overwrite: bool,
    model: str,
) -> None:
    from arborsim.trace.importers.requests import (
        FORMATS,
        Request,
        read_requests,
        shared_prefix_tokens,
    )
    from arborsim.trace.importers.write import NO_ENDS, Description, check_out

    check_out(out, overwrite)
    contents, block_tokens = read_requests(log, name, limit), FORMATS[name].block_tokens
    extra = {"prefix_block_tokens": block_tokens, **NO_ENDS}
    about = Description(name, "requests", "linear", "the source's", {}, extra)
    _write(log, out, contents, about, on_damage, overwrite, model)
    if block_tokens:
        requests = [search for search in contents.searches if isinstance(search, Request)]
        saved = shared_prefix_tokens(requests, block_tokens)
        whole = sum(request.prompt_tokens for request in requests)
        typer.echo(
            f"{saved:,} of {whole:,} prompt tokens ({saved / whole:.1%}) had come before, as a "
            f"prefix of whole {block_tokens}-token blocks; replays treat requests one by one"
        )


def _write(
    log: Path,
    out: Path,
    contents: Contents,
    about: Description,
    on_damage: OnDamage,
    overwrite: bool,
    model: str,
) -> None:
    from arborsim.cli.progress import PatientProgress
    from arborsim.machine.lookup import load_geometry
    from arborsim.trace.importers.write import refuse_damage, trace_info, write_trace

    if out.exists() and out.samefile(log):
        raise UsageError(f"{out} is the recording itself: choose another name")
    if on_damage is OnDamage.refuse or not contents.searches:
        refuse_damage(log, contents)
    command = shlex.join(["arborsim", *sys.argv[1:]])
    info = trace_info(log, about, contents, load_geometry(model), command)
    tokens = sum(search.num_tokens for search in contents.searches)
    with PatientProgress(tokens) as progress:
        write_trace(contents, info, out, overwrite, progress.advance)
    for damaged in contents.damaged[:_MOST_SHOWN]:
        typer.echo(f"left out {damaged.place}: {damaged.what}", err=True)
    if len(contents.damaged) > _MOST_SHOWN:
        more = len(contents.damaged) - _MOST_SHOWN
        typer.echo(f"left out {more} more; the trace's metadata names them", err=True)
    typer.echo(
        f"wrote {out}: {len(contents.searches):,} searches, {tokens:,} tokens; "
        f"lengths: {about.lengths}; {len(contents.damaged)} of {contents.items:,} items left out"
    )
