"""`arborsim import`: make traces of recordings in other formats."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from arborsim.core.errors import UsageError
from arborsim.products.command import argument, group, option, subcommand
from arborsim.products.options import command_line
from arborsim.report.progress import PatientProgress
from arborsim.report.words import plain

if TYPE_CHECKING:
    from arborsim.trace.importers.sources import Contents, Description

import_ = group("Make a trace of a recording in another format (structure and lengths).")
OnDamage = StrEnum("OnDamage", ["refuse", "skip"])
Order = StrEnum("Order", {"levels": "levels", "depth_first": "depth-first"})
_MOST_SHOWN = 10


@dataclass(frozen=True)
class ImportOptions:
    """What is read, and the trace that is made."""

    log: Path = argument(..., "The recording.")
    out: Path = argument(..., "The trace to make.", writes=True)
    limit: int = option(0, "Items to read.", shown="all", min=0)
    on_damage: OnDamage = option(
        OnDamage.refuse, "Damaged items: refuse the file, or skip and name them."
    )
    overwrite: bool = option(False, "Replace the trace.", "--overwrite")
    model: str = option(
        "llama-3.1-8b",
        "Geometry to charge for: a name, or a config.json. None is recorded.",
        complete="model",
    )

    def write(self, contents: Contents[Any], about: Description) -> None:
        """Make the trace, and say what was left out."""
        from arborsim.machine.lookup import load_geometry
        from arborsim.trace.importers.sources import refuse_damage, trace_info, write_trace

        if self.on_damage is OnDamage.refuse or not contents.searches:
            refuse_damage(self.log, contents)
        geometry = load_geometry(self.model)
        info = trace_info(self.log, about, contents, geometry, command_line())
        tokens = sum(search.num_tokens for search in contents.searches)
        with PatientProgress(tokens) as progress:
            write_trace(contents, info, self.out, self.overwrite, progress.advance)
        for damaged in contents.damaged[:_MOST_SHOWN]:
            typer.echo(f"left out {plain(damaged)}", err=True)
        if len(contents.damaged) > _MOST_SHOWN:
            more = len(contents.damaged) - _MOST_SHOWN
            typer.echo(f"left out {more} more; the trace's metadata names them", err=True)
        typer.echo(
            f"wrote {self.out}: {len(contents.searches):,} searches, {tokens:,} tokens; lengths: "
            f"{about.lengths}; {len(contents.damaged)} of {contents.items:,} items left out"
        )


@dataclass(frozen=True)
class LengthOptions:
    """Tokens of what has text only."""

    tokens_per_character: float = option(0.62, "Tokens of a text, where the source has no number.")
    prompt_tokens: int = option(0, "Length of the prompt.", shown="of the problem's text", min=0)
    thought_tokens: int = option(0, "Length of each thought.", shown="of its text", min=0)

    def check(self, value_scale: float) -> None:
        if not 0 < self.tokens_per_character <= 100:
            raise UsageError("--tokens-per-character is a number above 0, at most 100")
        if not 0 < value_scale < float("inf"):
            raise UsageError("--value-scale is a finite number above 0")

    def given(self) -> dict[str, Any]:
        """Those that the trace's metadata has: lengths that were made up."""
        return {name: value for name, value in asdict(self).items() if value}

    def said(self) -> str:
        if self.thought_tokens:
            return f"{self.thought_tokens} a thought, as asked for"
        return f"characters x {self.tokens_per_character:g}, rounded"


@subcommand(import_, "Log of the tree-of-thoughts program (JSON).")
def tot(
    given: ImportOptions,
    lengths: LengthOptions = LengthOptions(),
    value_scale: float = option(60.0, "Value that becomes reward 1."),
    task: str = option("", "Name of the task.", shown="game24; crosswords if depth first"),
) -> None:
    """Log of the tree-of-thoughts program (JSON): breadth first, depth first, or samples."""
    from arborsim.trace.importers.sources import NO_ENDS, Description, check_out, read_list
    from arborsim.trace.importers.tot import DEPTH_FIRST, TotLog

    lengths.check(value_scale)
    check_out(given.out, given.overwrite)
    reading = TotLog(**asdict(lengths), value_scale=value_scale)
    contents = read_list(given.log, reading.search_of, given.limit)
    searches = sorted({search.algorithm for search in contents.searches})
    deep = DEPTH_FIRST in searches
    about = Description(
        "tot", task or ("crosswords" if deep else "game24"), ", ".join(searches), lengths.said(),
        lengths.given() | {"value_scale": value_scale}, NO_ENDS if deep else {},
    )  # fmt: skip
    given.write(contents, about)


@subcommand(import_, "Trees of nested objects (JSON, or JSON lines).")
def tree(
    given: ImportOptions,
    root: str = option("", "Field that holds the tree; a.b: b in a.", shown="the item itself"),
    children: str = option("children", "Field of a node that lists its children."),
    text: str = option("text", "Field of a node's text; '' for none."),
    value: str = option("", "Field of a node's value, which becomes its reward.", shown="none"),
    tokens: str = option("", "Field of a node's number of tokens.", shown="by the text"),
    order: Order = option(Order.levels, "How the tree is written: level by level, or depth first."),
    lengths: LengthOptions = LengthOptions(),
    value_scale: float = option(1.0, "Value that becomes reward 1."),
    task: str = option("reasoning trees", "Name of the task."),
) -> None:
    """Trees of nested objects (JSON, or JSON lines): which field has what is named here."""
    from arborsim.trace.importers.sources import NO_ENDS, Description, check_out, read_objects
    from arborsim.trace.importers.trees import NestedTree

    lengths.check(value_scale)
    if not children:
        raise UsageError("--children names the field that lists the children of a node")
    if not (text or tokens or lengths.thought_tokens):
        raise UsageError("lengths need --text, --tokens or --thought-tokens")
    check_out(given.out, given.overwrite)
    deep = order is Order.depth_first
    reading = NestedTree(
        **asdict(lengths), children=children, text=text, value=value, tokens=tokens, root=root,
        value_scale=value_scale, depth_first=deep,
    )  # fmt: skip
    contents = read_objects(given.log, reading.search_of, given.limit)
    options = lengths.given() | {
        "children": children, "text": text, "value": value, "tokens": tokens, "root": root,
        "value_scale": value_scale,
    }  # fmt: skip
    how = "depth first" if deep else "level by level"
    said = f"the source's ({tokens})" if tokens else lengths.said()
    given.write(contents, Description("tree", task, how, said, options, NO_ENDS))


@subcommand(import_)
def deft(given: ImportOptions) -> None:
    """DeFT's reasoning trees (JSON): tokens per node."""
    from arborsim.trace.importers.sources import NO_ENDS, Description, check_out, read_list
    from arborsim.trace.importers.trees import deft_search

    check_out(given.out, given.overwrite)
    contents = read_list(given.log, deft_search, given.limit)
    about = Description("deft", "reasoning trees", "level by level", "the source's", {}, NO_ENDS)
    given.write(contents, about)


@subcommand(import_, "Mooncake's requests (JSON lines), 512-token prefix blocks.")
def mooncake(given: ImportOptions) -> None:
    """Mooncake's requests (JSON lines): arrivals in ms, 512-token prefix blocks."""
    _requests("mooncake", given)


@subcommand(import_, "Qwen-Bailian's requests (JSON lines), 16-token blocks.")
def bailian(given: ImportOptions) -> None:
    """Qwen-Bailian's requests (JSON lines): arrivals in s, 16-token prefix blocks."""
    _requests("bailian", given)


@subcommand(import_)
def azure(given: ImportOptions) -> None:
    """Azure's requests (CSV): arrivals and lengths."""
    _requests("azure", given)


def _requests(name: str, given: ImportOptions) -> None:
    from arborsim.trace.importers import requests
    from arborsim.trace.importers.sources import NO_ENDS, Description, check_out

    check_out(given.out, given.overwrite)
    contents = requests.read_requests(given.log, name, given.limit)
    block_tokens = requests.FORMATS[name].block_tokens
    extra = {"prefix_block_tokens": block_tokens, **NO_ENDS}
    given.write(contents, Description(name, "requests", "linear", "the source's", {}, extra))
    if block_tokens:
        saved = requests.shared_prefix_tokens(contents.searches, block_tokens)
        whole = sum(request.prompt_tokens for request in contents.searches)
        typer.echo(
            f"{saved:,} of {whole:,} prompt tokens ({saved / whole:.1%}) had come before, as a "
            f"prefix of whole {block_tokens}-token blocks: plans share them, replays do not"
        )
