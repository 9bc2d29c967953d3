"""`arborsim import`: make traces of recordings in other formats."""

from __future__ import annotations

import sys
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from arborsim.core.errors import UsageError
from arborsim.products.declare import Count, Option, Options, Written
from arborsim.products.options import command_line
from arborsim.report.progress import PatientProgress
from arborsim.report.words import plain

if TYPE_CHECKING:
    from arborsim.trace.importers.sources import Contents, Description

_MOST_SHOWN = 10


@dataclass(frozen=True)
class ImportOptions(Options):
    """The recording that is read, and the trace that is made.

    Parameters
    ----------
    log
        The recording.
    out
        The trace to make.
    limit
        Items to read.
    on_damage
        Damaged items: refuse the file, or skip and name them.
    overwrite
        Replace the trace.
    model
        Geometry to charge for: a name, or a config.json. None is recorded.
    """

    log: Path
    out: Written
    _: KW_ONLY
    limit: Annotated[Count, Option(shown="all")] = 0
    on_damage: Literal["refuse", "skip"] = "refuse"
    overwrite: bool = False
    model: Annotated[str, Option(complete="model")] = "llama-3.1-8b"

    def write(self, contents: Contents[Any], about: Description) -> None:
        """Make the trace, and say what was left out."""
        from arborsim.machine.lookup import load_geometry
        from arborsim.trace.importers.sources import refuse_damage, trace_info, write_trace

        if self.on_damage == "refuse" or not contents.searches:
            refuse_damage(self.log, contents)
        geometry = load_geometry(self.model)
        info = trace_info(self.log, about, contents, geometry, command_line())
        tokens = sum(search.num_tokens for search in contents.searches)
        with PatientProgress(tokens) as progress:
            write_trace(contents, info, self.out, self.overwrite, progress.advance)
        for damaged in contents.damaged[:_MOST_SHOWN]:
            print(f"left out {plain(damaged)}", file=sys.stderr)
        if len(contents.damaged) > _MOST_SHOWN:
            more = len(contents.damaged) - _MOST_SHOWN
            print(f"left out {more} more; the trace's metadata names them", file=sys.stderr)
        print(
            f"wrote {self.out}: {len(contents.searches):,} searches, {tokens:,} tokens; lengths: "
            f"{about.lengths}; {len(contents.damaged)} of {contents.items:,} items left out"
        )


@dataclass(frozen=True, kw_only=True)
class LengthOptions(Options):
    """Tokens of what has text only.

    Parameters
    ----------
    tokens_per_character
        Tokens of a text, where the source has no number.
    prompt_tokens
        Length of the prompt.
    thought_tokens
        Length of each thought.
    """

    tokens_per_character: float = 0.62
    prompt_tokens: Annotated[Count, Option(shown="of the problem's text")] = 0
    thought_tokens: Annotated[Count, Option(shown="of its text")] = 0

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


def tot(
    given: ImportOptions,
    lengths: LengthOptions,
    *,
    value_scale: float = 60.0,
    task: Annotated[str, Option(shown="game24; crosswords if depth first")] = "",
) -> None:
    """Log of the tree-of-thoughts program (JSON).

    It is breadth first, depth first, or samples.

    Parameters
    ----------
    value_scale
        Value that becomes reward 1.
    task
        Name of the task.
    """
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


def tree(
    given: ImportOptions,
    lengths: LengthOptions,
    *,
    root: Annotated[str, Option(shown="the item itself")] = "",
    children: str = "children",
    text: str = "text",
    value: Annotated[str, Option(shown="none")] = "",
    tokens: Annotated[str, Option(shown="by the text")] = "",
    order: Literal["levels", "depth-first"] = "levels",
    value_scale: float = 1.0,
    task: str = "reasoning trees",
) -> None:
    """Trees of nested objects (JSON, or JSON lines).

    Options name the fields.

    Parameters
    ----------
    root
        Field that holds the tree. a.b is b in a.
    children
        Field of a node that lists its children.
    text
        Field of a node's text, or '' for none.
    value
        Field of a node's value, which becomes its reward.
    tokens
        Field of a node's number of tokens.
    order
        How the tree is written: level by level, or depth first.
    value_scale
        Value that becomes reward 1.
    task
        Name of the task.
    """
    from arborsim.trace.importers.sources import NO_ENDS, Description, check_out, read_objects
    from arborsim.trace.importers.trees import NestedTree

    lengths.check(value_scale)
    if not children:
        raise UsageError("--children names the field that lists the children of a node")
    if not (text or tokens or lengths.thought_tokens):
        raise UsageError("lengths need --text, --tokens or --thought-tokens")
    check_out(given.out, given.overwrite)
    deep = order == "depth-first"
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


def deft(
    given: ImportOptions,
) -> None:
    """DeFT's reasoning trees (JSON): tokens per node."""
    from arborsim.trace.importers.sources import NO_ENDS, Description, check_out, read_list
    from arborsim.trace.importers.trees import deft_search

    check_out(given.out, given.overwrite)
    contents = read_list(given.log, deft_search, given.limit)
    about = Description("deft", "reasoning trees", "level by level", "the source's", {}, NO_ENDS)
    given.write(contents, about)


def mooncake(
    given: ImportOptions,
) -> None:
    """Mooncake's requests (JSON lines), 512-token prefix blocks."""
    _requests("mooncake", given)


def bailian(
    given: ImportOptions,
) -> None:
    """Qwen-Bailian's requests (JSON lines), 16-token blocks."""
    _requests("bailian", given)


def azure(
    given: ImportOptions,
) -> None:
    """Azure's requests (CSV): arrivals and lengths."""
    _requests("azure", given)


_MADE = (tot, tree, deft, mooncake, bailian, azure)
SUBCOMMANDS = {made.__name__: made for made in _MADE}


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
        print(
            f"{saved:,} of {whole:,} prompt tokens ({saved / whole:.1%}) had come before, as a "
            f"prefix of whole {block_tokens}-token blocks: plans share them, replays do not"
        )
