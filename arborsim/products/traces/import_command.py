"""`arborsim import`: make traces of recordings in other formats."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from arborsim.core.errors import UsageError
from arborsim.products.declare import Count, Option, Options, Written
from arborsim.products.options import command_line
from arborsim.report.progress import PatientProgress
from arborsim.report.words import plain

if TYPE_CHECKING:
    from arborsim.trace.importers.request_logs import Reading
    from arborsim.trace.importers.searches import Lengths
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
        self.report(contents, "searches", about.lengths)

    def report(self, contents: Contents[Any], what: str, lengths: str) -> None:
        """Say what was made, and what was left out."""
        for damaged in contents.damaged[:_MOST_SHOWN]:
            print(f"left out {plain(damaged)}", file=sys.stderr)
        if len(contents.damaged) > _MOST_SHOWN:
            more = len(contents.damaged) - _MOST_SHOWN
            print(f"left out {more} more; the trace's metadata names them", file=sys.stderr)
        tokens = sum(search.num_tokens for search in contents.searches)
        print(
            f"wrote {self.out}: {len(contents.searches):,} {what}, {tokens:,} tokens; lengths: "
            f"{lengths}; {len(contents.damaged)} of {contents.items:,} items left out"
        )


@dataclass(frozen=True, kw_only=True)
class TextOptions(Options):
    """Tokens of what has text only.

    Parameters
    ----------
    tokenizer
        A tokenizer.json, or its folder, to count tokens of texts with.
    tokens_per_character
        Tokens of a text, where the source has no number: a rate, or prose or game24.
    """

    tokenizer: Annotated[str, Option(shown="none")] = ""
    tokens_per_character: Annotated[str, Option(shown="to be said")] = ""

    def lengths(self, usual: str = "") -> dict[str, Any]:
        """Fields of `Lengths`; `usual` is the kind of text if none is named."""
        from arborsim.trace.importers.searches import RATES, Lengths

        said = str(self.tokens_per_character) or usual
        try:
            rate = RATES[said] if said in RATES else float(said or 0)
        except ValueError:
            rate = math.nan
        if not 0 <= rate <= 100 or (said and not rate):
            kinds = " or ".join(RATES)
            raise UsageError(f"--tokens-per-character is a number above 0, at most 100, or {kinds}")
        known = {name: getattr(self, name) for name in vars(Lengths()) if hasattr(self, name)}
        return {**known, "tokens_per_character": rate}


@dataclass(frozen=True, kw_only=True)
class LengthOptions(TextOptions):
    """Lengths that are made up.

    Parameters
    ----------
    prompt_tokens
        Length of the prompt.
    thought_tokens
        Length of each thought.
    """

    prompt_tokens: Annotated[Count, Option(shown="of the problem's text")] = 0
    thought_tokens: Annotated[Count, Option(shown="of its text")] = 0


@dataclass(frozen=True, kw_only=True)
class RequestOptions(TextOptions):
    """Facts that a log of requests does not say itself.

    Parameters
    ----------
    field
        Columns of an unknown format: arrival=COL,prompt=COL,output=COL,prefix=COL.
    time_unit
        Unit of times: s, ms, us or ns.
    block_tokens
        Tokens of a prefix block.
    token_s
        Seconds a token of an answer takes where the session's next request waits for it.
    """

    field: Annotated[Sequence[str], Option(shown="recognised")] = ()
    time_unit: Annotated[str, Option(shown="the format's, or s")] = ""
    block_tokens: Annotated[Count, Option(shown="the format's")] = 0
    token_s: float = 0.03

    def reading(self, format: str = "") -> Reading:
        """These options as `read_requests` takes them."""
        from arborsim.trace.importers.request_logs import UNITS, Reading, columns_of
        from arborsim.trace.importers.searches import Lengths

        if self.time_unit and self.time_unit not in UNITS:
            raise UsageError(
                f"--time-unit is one of {', '.join(UNITS)}, not {self.time_unit!r:.20}"
            )
        if not 0 <= self.token_s < math.inf:
            raise UsageError("--token-s is a finite number of seconds, at least 0")
        columns = columns_of(",".join(self.field)) if self.field else None
        lengths = Lengths(**self.lengths())
        return Reading(format, columns, self.time_unit, self.block_tokens, self.token_s, lengths)


def _made_up(lengths: Lengths) -> dict[str, Any]:
    """Lengths that were made up, for the trace's metadata."""
    if lengths.tokenizer:
        return {"tokenizer": Path(lengths.tokenizer).name}
    names = ("tokens_per_character", "prompt_tokens", "thought_tokens")
    return {name: getattr(lengths, name) for name in names if getattr(lengths, name)}


def _check_scale(value_scale: float) -> None:
    if not 0 < value_scale < math.inf:
        raise UsageError("--value-scale is a finite number above 0")


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

    _check_scale(value_scale)
    check_out(given.out, given.overwrite)
    reading = TotLog(**lengths.lengths("game24"), value_scale=value_scale)
    contents = read_list(given.log, reading.search_of, given.limit)
    searches = sorted({search.algorithm for search in contents.searches})
    deep = DEPTH_FIRST in searches
    about = Description(
        "tot", task or ("crosswords" if deep else "game24"), ", ".join(searches), reading.said(),
        _made_up(reading) | {"value_scale": value_scale}, NO_ENDS if deep else {},
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
    parent: Annotated[str, Option(shown="recognised")] = "",
    node_id: Annotated[str, Option(shown="recognised")] = "",
    order: Literal["levels", "depth-first"] = "levels",
    value_scale: Annotated[float, Option(shown="the largest value, if any is above 1")] = 0.0,
    task: str = "reasoning trees",
) -> None:
    """Trees of nested objects, or of nodes naming parents (JSON).

    JSON lines are read, too. Options name the fields. Recognised are search-and-learn's
    completions, inspect_ai's logs, and KV events of vLLM and SGLang.

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
    parent
        Field of a flat node that names its parent.
    node_id
        Field of a flat node's own name.
    order
        How the tree is written: level by level, or depth first.
    value_scale
        Value that becomes reward 1.
    task
        Name of the task.
    """
    from arborsim.trace.importers.sources import NO_ENDS, Description, check_out
    from arborsim.trace.importers.trees import NestedTree

    _check_scale(value_scale or 1.0)
    if not children:
        raise UsageError("--children names the field that lists the children of a node")
    if not (text or tokens or lengths.thought_tokens):
        raise UsageError("lengths need --text, --tokens or --thought-tokens")
    check_out(given.out, given.overwrite)
    deep = order == "depth-first"
    reading = NestedTree(
        **lengths.lengths(), children=children, text=text, value=value, tokens=tokens, root=root,
        value_scale=value_scale, depth_first=deep, parent=parent, node_id=node_id,
    )  # fmt: skip
    contents, moved = reading.read(given.log, given.limit)
    options = _made_up(reading) | {
        "children": children, "text": text, "value": value, "tokens": tokens, "root": root,
        "value_scale": value_scale,
    }  # fmt: skip
    how = "depth first" if deep else "level by level"
    said = f"the source's ({tokens})" if tokens else reading.said()
    given.write(contents, Description("tree", task, how, said, options, NO_ENDS))
    if moved:
        print(moved)


def deft(given: ImportOptions) -> None:
    """DeFT's reasoning trees (JSON): tokens per node."""
    from arborsim.trace.importers.sources import NO_ENDS, Description, check_out, read_list
    from arborsim.trace.importers.trees import deft_search

    check_out(given.out, given.overwrite)
    contents = read_list(given.log, deft_search, given.limit)
    about = Description("deft", "reasoning trees", "level by level", "the source's", {}, NO_ENDS)
    given.write(contents, about)


def requests(given: ImportOptions, reading: RequestOptions) -> None:
    """Log of requests, in a known format or by its columns.

    Recognised are Mooncake, AIPerf, Azure, BurstGPT, Bailian, ShareGPT, Vidur, Dynamo's request
    traces, results of the serving benchmarks of vLLM and SGLang, inspect_ai, and OpenTelemetry.
    """
    _requests(given, reading)


def mooncake(given: ImportOptions) -> None:
    """Mooncake's requests (JSON lines), 512-token prefix blocks."""
    _requests(given, RequestOptions(), "mooncake")


def bailian(given: ImportOptions) -> None:
    """Qwen-Bailian's requests (JSON lines), 16-token blocks."""
    _requests(given, RequestOptions(), "bailian")


def azure(given: ImportOptions) -> None:
    """Azure's requests (CSV): arrivals and lengths."""
    _requests(given, RequestOptions(), "azure")


_MADE = (tot, tree, deft, requests, mooncake, bailian, azure)
SUBCOMMANDS = {made.__name__: made for made in _MADE}


def _requests(given: ImportOptions, reading: RequestOptions, format: str = "") -> None:
    from arborsim.products.traces.requests import import_requests, said_of

    with PatientProgress(None) as progress:
        log = import_requests(
            given.log,
            given.out,
            reading.reading(format),
            limit=given.limit,
            skip_damaged=given.on_damage == "skip",
            overwrite=given.overwrite,
            model=given.model,
            command=command_line(),
            advance=progress.advance,
        )
    given.report(log, "requests", log.lengths)
    for line in said_of(log):
        print(line)
