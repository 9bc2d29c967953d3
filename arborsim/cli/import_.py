"""`arborsim import`: recordings that others made become traces."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arborsim.cli.command import PanelCommand, argument, command, option
from arborsim.cli.options import command_line
from arborsim.cli.progress import PatientProgress
from arborsim.core.errors import UsageError

if TYPE_CHECKING:
    from arborsim.trace.importers.sources import Contents, Description

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


@dataclass(frozen=True)
class ImportOptions:
    """What is read, and the trace that is made."""

    log: Annotated[Path, argument("The recording.")]
    out: Annotated[Path, argument("The trace to make.")]
    limit: Annotated[int, option("Items to read.", default="all", min=0)] = 0
    on_damage: Annotated[
        OnDamage, option("Damaged items: refuse the file, or skip and name them.")
    ] = OnDamage.refuse
    overwrite: Annotated[bool, option("Replace the trace.", "--overwrite")] = False
    model: Annotated[
        str,
        option(
            "Geometry to charge for: a name, or a config.json. None is recorded.", complete="model"
        ),
    ] = "llama-3.1-8b"

    def check(self) -> None:
        """Refuse, before the work, what cannot be written."""
        from arborsim.trace.importers.sources import check_out

        check_out(self.out, self.overwrite)

    def write(self, contents: Contents[Any], about: Description) -> None:
        """Make the trace, and say what was left out."""
        from arborsim.machine.lookup import load_geometry
        from arborsim.trace.importers.sources import refuse_damage, trace_info, write_trace

        if self.out.exists() and self.out.samefile(self.log):
            raise UsageError(f"{self.out} is the recording itself: choose another name")
        if self.on_damage is OnDamage.refuse or not contents.searches:
            refuse_damage(self.log, contents)
        geometry = load_geometry(self.model)
        info = trace_info(self.log, about, contents, geometry, command_line())
        tokens = sum(search.num_tokens for search in contents.searches)
        with PatientProgress(tokens) as progress:
            write_trace(contents, info, self.out, self.overwrite, progress.advance)
        for damaged in contents.damaged[:_MOST_SHOWN]:
            typer.echo(f"left out {damaged.place}: {damaged.what}", err=True)
        if len(contents.damaged) > _MOST_SHOWN:
            more = len(contents.damaged) - _MOST_SHOWN
            typer.echo(f"left out {more} more; the trace's metadata names them", err=True)
        typer.echo(
            f"wrote {self.out}: {len(contents.searches):,} searches, {tokens:,} tokens; lengths: "
            f"{about.lengths}; {len(contents.damaged)} of {contents.items:,} items left out"
        )


@import_.command(cls=PanelCommand, short_help="Log of the tree-of-thoughts program (JSON).")
@command
def tot(
    given: ImportOptions,
    tokens_per_character: Annotated[
        float, option("Lengths of thoughts: the log has text, but no tokens.")
    ] = 0.62,
    prompt_tokens: Annotated[
        int, option("Length of the prompt.", default="of the problem's text", min=0)
    ] = 0,
    value_scale: Annotated[float, option("Value that becomes reward 1.")] = 60.0,
    task: Annotated[str, option("Name of the task.")] = "game24",
) -> None:
    """Log of the tree-of-thoughts program (JSON): states, proposals, values, verdicts."""
    from arborsim.trace.importers.sources import Description, read_list
    from arborsim.trace.importers.trees import TotLog

    if not 0 < tokens_per_character <= 100:
        raise UsageError("--tokens-per-character is a number above 0, at most 100")
    if not 0 < value_scale < float("inf"):
        raise UsageError("--value-scale is a finite number above 0")
    given.check()
    reading = TotLog(tokens_per_character, prompt_tokens, value_scale)
    contents = read_list(given.log, reading.search_of, given.limit)
    options = {"tokens_per_character": tokens_per_character, "value_scale": value_scale}
    if prompt_tokens:
        options["prompt_tokens"] = prompt_tokens
    lengths = f"characters x {tokens_per_character:g}, rounded"
    given.write(contents, Description("tot", task, "tot-bfs", lengths, options, {}))


@import_.command(cls=PanelCommand)
@command
def deft(given: ImportOptions) -> None:
    """DeFT's reasoning trees (JSON): tokens per node."""
    from arborsim.trace.importers.sources import NO_ENDS, Description, read_list
    from arborsim.trace.importers.trees import deft_search

    given.check()
    contents = read_list(given.log, deft_search, given.limit)
    about = Description("deft", "reasoning trees", "level by level", "the source's", {}, NO_ENDS)
    given.write(contents, about)


@import_.command(
    cls=PanelCommand, short_help="Mooncake's requests (JSON lines), 512-token prefix blocks."
)
@command
def mooncake(given: ImportOptions) -> None:
    """Mooncake's requests (JSON lines): arrivals in ms, 512-token prefix blocks."""
    _requests("mooncake", given)


@import_.command(
    cls=PanelCommand, short_help="Qwen-Bailian's requests (JSON lines), 16-token blocks."
)
@command
def bailian(given: ImportOptions) -> None:
    """Qwen-Bailian's requests (JSON lines): arrivals in s, 16-token prefix blocks."""
    _requests("bailian", given)


@import_.command(cls=PanelCommand)
@command
def azure(given: ImportOptions) -> None:
    """Azure's requests (CSV): arrivals and lengths."""
    _requests("azure", given)


def _requests(name: str, given: ImportOptions) -> None:
    from arborsim.trace.importers.requests import (
        FORMATS,
        read_requests,
        shared_prefix_tokens,
    )
    from arborsim.trace.importers.sources import NO_ENDS, Description

    given.check()
    contents = read_requests(given.log, name, given.limit)
    block_tokens = FORMATS[name].block_tokens
    extra = {"prefix_block_tokens": block_tokens, **NO_ENDS}
    given.write(contents, Description(name, "requests", "linear", "the source's", {}, extra))
    if block_tokens:
        saved = shared_prefix_tokens(contents.searches, block_tokens)
        whole = sum(request.prompt_tokens for request in contents.searches)
        typer.echo(
            f"{saved:,} of {whole:,} prompt tokens ({saved / whole:.1%}) had come before, as a "
            f"prefix of whole {block_tokens}-token blocks; replays treat requests one by one"
        )
