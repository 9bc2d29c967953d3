"""Recordings that others made: their items, the searches these become, and the trace of those.

An item of a source becomes a search, as batches of thoughts, or is reported as damaged: what is
wrong with its fields is a `Damage`, to which the loop over the items adds the place.  The trace is
written whole or not at all, and its metadata says what its source did not know.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from dataclasses import field as attribute
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.core.geometry import Geometry
from arborsim.trace.schema import Capture, End, Kind, TraceInfo
from arborsim.trace.writer import WholeTraceWriter

#: Most tokens of one search; more is a damaged length, and would not fit the memory.
MOST_TOKENS = 1 << 24


class Damage(ValueError):
    """What is wrong with one item of a source."""


def field(item: Any, name: str) -> Any:
    """The field of a JSON object."""
    if not isinstance(item, dict):
        raise Damage(f"expected an object with {name}, found {kind_of(item)}")
    if name not in item:
        raise Damage(f"{name} is missing")
    return item[name]


def whole(value: Any, what: str, low: int = 0, high: int = MOST_TOKENS) -> int:
    """An integer between `low` and `high`; neither a truth value nor a fraction."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise Damage(f"{what} is {shown(value)} instead of a whole number")
    if not low <= value <= high:
        raise Damage(f"{what} is {shown(value)}, not between {low} and {high}")
    return value


def finite(value: Any, what: str, low: float = -math.inf) -> float:
    """A finite number of at least `low`."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise Damage(f"{what} is {shown(value)} instead of a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number < low:
        raise Damage(f"{what} is {shown(value)}")
    return number


def reward(value: Any, what: str, scale: float) -> float:
    """A value of the source as a reward, of which `scale` makes 1."""
    share = finite(value, what, low=0.0) / scale
    if share > 1:
        raise Damage(f"{what} is {shown(value)}, more than {scale:g}")
    return share


def text(value: Any, what: str) -> str:
    """A string that can be stored (JSON can name half of a surrogate pair)."""
    if not isinstance(value, str):
        raise Damage(f"{what} is {shown(value)} instead of text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Damage(f"{what} is text with half a surrogate pair") from None
    return value


def array(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise Damage(f"{what} is {shown(value)} instead of a list")
    return value


def shown(value: Any) -> str:
    """A value for a message: short, and never thousands of digits."""
    if isinstance(value, int) and abs(value) > 10**18:
        return "a huge number"
    return f"{value!r:.40}"


def kind_of(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", type(None): "null"}
    return names.get(type(value), "a number or truth value")


@dataclass(frozen=True)
class Thought:
    """A thought block."""

    #: Number of the block above; 0 is the prompt, and thoughts count from 1 in batch order
    parent: int
    tokens: int
    reward: float = math.nan  # in [0, 1]; NaN for none
    text: str | None = None
    correct: int = -1  # 1, 0, or -1 for "not judged"
    end: End = End.NONE
    answer: str | None = None  # only of finished thoughts
    embedding: np.ndarray | None = attribute(default=None, compare=False)  # float [size]


@dataclass(frozen=True)
class ThoughtBatch:
    """Thoughts that are decoded together, and the blocks given up afterwards."""

    thoughts: Sequence[Thought]
    pruned: Sequence[int] = ()


def one_by_one(thoughts: Sequence[Thought], ends_given_up: bool = False) -> list[ThoughtBatch]:
    """Thoughts of a depth-first search, in the order of its visits, as batches of one.

    Each continues the one before it or a block above that.  To go on from a block above is to
    return to it: what is left below is given up, the deepest first.  The last thought is if
    `ends_given_up`.
    """
    path = [0]
    left: list[list[int]] = []
    for number, thought in enumerate(thoughts, 1):
        at = path.index(thought.parent)
        left.append(path[:at:-1])
        path = [*path[: at + 1], number]
    last = path[-1:] if ends_given_up else []
    return [
        ThoughtBatch([thought], given_up)
        for thought, given_up in zip(thoughts, [*left, last][1:], strict=True)
    ]


@dataclass(frozen=True)
class FinalAnswer:
    """How a search ended: the chosen leaf, the verdict (1, 0 or -1), and the text."""

    node: int
    correct: int
    text: str | None = None


@dataclass(frozen=True)
class Lengths:
    """Tokens of texts: sources that have text have no tokens."""

    #: In GPT-4's Game of 24 log there are 138,989 pieces of about cl100k's splitting pattern (a
    #: token or more each) in 225,183 characters
    tokens_per_character: float = 0.62
    #: Of the prompt, of which the source has only the problem or nothing; 0: the problem's length
    prompt_tokens: int = 0
    thought_tokens: int = 0  # of each thought; 0: its text's length

    def of(self, written: str) -> int:
        """Tokens of a text; at least one."""
        return max(1, round(len(written) * self.tokens_per_character))

    def thought(self, written: str) -> int:
        return self.thought_tokens or self.of(written)

    def prompt(self, problem: str | None) -> int:
        if problem is None and not self.prompt_tokens:
            raise UsageError(
                "the recording does not hold its problems: give the length of the prompt with "
                "--prompt-tokens"
            )
        return self.prompt_tokens or self.of(problem or "")


#: Called with what was written, and its number of tokens.
Advance = Callable[[str, int], None]


class Imported(ABC):
    """What an item of a source becomes: one episode; a `Damage` if it has too many tokens."""

    #: Whether the trace is packed (`arborsim.trace.packed`)
    packed: ClassVar[bool] = False

    @property
    @abstractmethod
    def num_tokens(self) -> int: ...

    @classmethod
    @abstractmethod
    def write(cls, items: Sequence[Any], writer: WholeTraceWriter, advance: Advance) -> None:
        """Write items of this class, in order."""

    def __post_init__(self) -> None:
        if self.num_tokens > MOST_TOKENS:  # of which a trace's reader would have to hold them all
            raise Damage(f"it has {self.num_tokens} tokens, more than {MOST_TOKENS}")


@dataclass(frozen=True)
class WrittenSearch(Imported):
    """One search, whatever format it came in; a `Damage` if the prompt is empty."""

    prompt_tokens: int
    batches: Sequence[ThoughtBatch] = ()
    prompt_text: str | None = None
    answer: FinalAnswer | None = None
    algorithm: str = ""  # what searched, if that differs between sources of one format

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1:
            raise Damage("the prompt has no tokens")
        super().__post_init__()

    @property
    def num_tokens(self) -> int:
        thoughts = (thought for batch in self.batches for thought in batch.thoughts)
        return self.prompt_tokens + sum(thought.tokens for thought in thoughts)

    @classmethod
    def write(cls, items: Sequence[Any], writer: WholeTraceWriter, advance: Advance) -> None:
        for number, search in enumerate(items):
            writer.write_episode(search.columns())
            advance(f"search {number}", search.num_tokens)

    def columns(self) -> dict[str, Any]:
        """The rows of the search, as `arborsim.trace.columns.encode` takes them.

        Thoughts of a batch take a token each per iteration until they are complete; no token ids
        (null), and time stands still at 0, for no source here has either.
        """
        rows = _Rows(self.prompt_tokens)
        prompt = Thought(-1, self.prompt_tokens, text=self.prompt_text)
        position = np.arange(self.prompt_tokens)
        rows.add(Kind.PREFILL, np.zeros_like(position), position, [prompt])
        for batch in self.batches:
            rows.add_batch(batch)
        if self.answer is not None:
            last = Thought(-1, 0, text=self.answer.text, correct=self.answer.correct)
            rows.add(Kind.ANSWER, [self.answer.node], thoughts=[last])
        return rows.columns()


class _Rows:
    """Rows in the making: columns in pieces, and the thoughts that single rows are about.

    `parent`, `depth` and `ends` (tokens up to the end of a block) have an entry per block.
    """

    def __init__(self, prompt_tokens: int) -> None:
        self.parent, self.depth, self.ends = [-1], [0], [prompt_tokens]
        self.iteration = self.count = 0
        self.pieces: list[tuple[np.ndarray, ...]] = []
        self.thoughts: dict[int, Thought] = {}  # by row

    def add(
        self, kind: Kind, node: Any, position: Any = -1, thoughts: Sequence[Thought] = (),
        iteration: Any = None,
    ) -> None:  # fmt: skip
        """Append rows of one kind; the first of them are about `thoughts`."""
        node = np.asarray(node, dtype=np.int32)
        at = self.iteration if iteration is None else iteration
        self.pieces.append(np.broadcast_arrays(np.int8(kind), node, np.int32(at), position))
        self.thoughts.update(enumerate(thoughts, self.count))
        self.count += len(node)

    def add_batch(self, batch: ThoughtBatch) -> None:
        thoughts = batch.thoughts
        numbers = np.arange(len(self.parent), len(self.parent) + len(thoughts))
        starts = np.asarray([self.ends[thought.parent] for thought in thoughts], dtype=np.int64)
        for thought in thoughts:
            self.parent.append(thought.parent)
            self.depth.append(self.depth[thought.parent] + 1)
            self.ends.append(self.ends[thought.parent] + thought.tokens)
        self.add(Kind.TRANSITION, numbers)
        lengths = np.asarray([thought.tokens for thought in thoughts], dtype=np.int64)
        leaf = np.repeat(np.arange(len(thoughts)), lengths)
        rank = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        order = np.lexsort((leaf, rank))
        leaf, rank = leaf[order], rank[order]
        at = self.iteration + 1 + rank
        self.add(Kind.TOKEN, numbers[leaf], starts[leaf] + rank, iteration=at)
        self.iteration += int(lengths.max(initial=0))
        self.add(Kind.BOUNDARY, numbers, thoughts=thoughts)
        self.add(Kind.PRUNE, batch.pruned)

    def columns(self) -> dict[str, Any]:
        kind, node, iteration, position = map(np.concatenate, zip(*self.pieces, strict=True))
        found = {
            "kind": kind, "iteration": iteration, "node": node, "position": position,
            "parent": np.asarray(self.parent, np.int32)[node],
            "depth": np.asarray(self.depth, np.int32)[node],
            "token": np.full(self.count, -1, dtype=np.int32), "time_s": np.zeros(self.count),
            "reward": np.full(self.count, np.nan, dtype=np.float32),
            "correct": np.full(self.count, -1, dtype=np.int8),
            "end": np.zeros(self.count, dtype=np.int8),
        }  # fmt: skip
        for name in ("reward", "correct", "end"):
            found[name][list(self.thoughts)] = [getattr(t, name) for t in self.thoughts.values()]
        for name in ("answer", "text", "embedding"):
            by_row = {row: getattr(thought, name) for row, thought in self.thoughts.items()}
            if any(value is not None for value in by_row.values()):
                found[name] = [by_row.get(row) for row in range(self.count)]
        return found


Search = TypeVar("Search", bound=Imported)


@dataclass(frozen=True)
class Contents(Generic[Search]):
    """What a source holds."""

    searches: tuple[Search, ...]
    #: Where and why an item is no search: ``"item 3: ..."`` of a JSON list, from 0, or ``"line 4:
    #: ..."``, from 1
    damaged: tuple[str, ...]
    items: int


def read_list(path: Path, search_of: Callable[[Any], Search], limit: int = 0) -> Contents[Search]:
    """The items of a JSON list; only the first `limit`, if that is not 0.

    Raises `UsageError` if the file cannot be read or is no JSON list.
    """
    found = _json(path)
    if not isinstance(found, list):
        raise UsageError(f"{path}: expected a JSON list of searches; is it the right file?")
    items = ((f"item {i}", item) for i, item in enumerate(found))
    return _contents(path, items, search_of, limit)


def read_objects(
    path: Path, search_of: Callable[[Any], Search], limit: int = 0
) -> Contents[Search]:
    """As `read_list`; the file may also hold one object alone, or an object a line."""
    lines = (line for line in _text(path).split("\n") if line.strip())
    if isinstance(_parsed(next(lines, "")), dict):
        return read_lines(path, lambda line: search_of(_object(line)), limit)
    found = _json(path)
    if isinstance(found, dict):
        return _contents(path, iter([("item 0", found)]), search_of, limit)
    return read_list(path, search_of, limit)


def _json(path: Path) -> Any:
    try:
        return json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        at = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise UsageError(f"{path}{at}: this is not JSON; is it the right file?") from None


def _parsed(line: str) -> Any:
    """What a line holds; None if it is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _object(line: str) -> dict[str, Any]:
    found = _parsed(line)
    if not isinstance(found, dict):
        raise Damage("this is no JSON object")
    return found


def read_lines(
    path: Path, search_of: Callable[[str], Search], limit: int = 0, header: str = ""
) -> Contents[Search]:
    """The lines of a file, empty ones left out; only the first `limit`, if that is not 0.

    Raises `UsageError` if the file cannot be read, or its first line is not `header`, if given.
    """
    lines = _text(path).split("\n")
    first = int(bool(header))
    if header and lines[0].strip().removeprefix("\ufeff") != header:
        raise UsageError(f"{path}, line 1: expected the header {header}; is it the right file?")
    items = ((f"line {i}", line) for i, line in enumerate(lines[first:], first + 1) if line.strip())
    return _contents(path, items, search_of, limit)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}: byte {error.start} is not UTF-8; is it the right file?"
        ) from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error


def _contents(
    path: Path, items: Iterator[tuple[str, Any]], search_of: Callable[[Any], Search], limit: int
) -> Contents[Search]:
    searches: list[Search] = []
    damaged: list[str] = []
    for place, item in islice(items, limit or None):
        try:
            searches.append(search_of(item))
        except Damage as error:
            damaged.append(f"{place}: {error}")
    count = len(searches) + len(damaged)
    if not count:
        raise UsageError(f"{path}: there is nothing in it")
    return Contents(tuple(searches), tuple(damaged), count)


#: `Description.extra` of a source that does not tell which thoughts ended (`TraceInfo.knows_ends`).
NO_ENDS = {"ends": "unknown"}


@dataclass(frozen=True)
class Description:
    """What a format says about its searches, for the trace's metadata."""

    #: `lengths` says where the numbers of tokens are from
    format: str
    task: str
    search: str
    lengths: str
    parameters: dict[str, Any]  # options of the import
    extra: dict[str, Any]


def refuse_damage(path: Path, contents: Contents[Any]) -> None:
    """Raise a `UsageError` that names the first damaged item, and counts all."""
    if not contents.damaged:
        return
    first, count = contents.damaged[0], len(contents.damaged)
    if not contents.searches:
        raise UsageError(f"{path}, {first}; {_nothing(contents)}")
    also = f" ({count} of {contents.items} are damaged)" if count > 1 else ""
    raise UsageError(
        f"{path}, {first}{also}; repair the file, or leave out what is damaged with "
        "--on-damage skip"
    )


def _nothing(contents: Contents[Any]) -> str:
    """What to do about a source of which no item could be read."""
    items = "its only item is" if contents.items == 1 else f"all {contents.items} items are"
    return (
        f"{items} unreadable as this format: is it the right file, and the right one of "
        "`arborsim import --help`?"
    )


def trace_info(
    path: Path, about: Description, contents: Contents[Any], geometry: Geometry, command: str = ""
) -> TraceInfo:
    """Metadata: the source by name and digest, what is made up, and what was left out."""
    extra = {
        **about.extra,
        "source": path.name,
        "source_format": about.format,
        "source_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "source_items": contents.items,
        "lengths": about.lengths,
        "token_ids": "unknown",
        "times": "unknown",
        "left_out": list(contents.damaged),
    }
    return TraceInfo(
        geometry=geometry,
        model=f"not named by the source; charged as {geometry.name}",
        task=about.task,
        search=about.search,
        search_parameters=about.parameters,
        capture=Capture.TREE,
        command=command,
        extra=extra,
    )


def write_trace(
    contents: Contents[Any],
    info: TraceInfo,
    out: Path,
    overwrite: bool = False,
    advance: Advance = lambda what, units: None,
) -> None:
    """Write the searches to `out`, which appears when all of them are written.

    Raises `UsageError` if `out` exists or cannot be written, or if there is no search to write.
    """
    check_out(out, overwrite)
    if not contents.searches:
        raise UsageError(f"nothing to import: {_nothing(contents)}")
    scrap = out.with_name(f".{out.name}.import")
    try:
        kind = type(contents.searches[0])
        with WholeTraceWriter(scrap, info, kind.packed) as writer:
            kind.write(contents.searches, writer, advance)
        os.replace(scrap, out)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        scrap.unlink(missing_ok=True)


def check_out(out: Path, overwrite: bool) -> None:
    """Refuse an output that exists or has no folder, before anything is read."""
    if out.is_dir():
        raise UsageError(f"{out} is a directory: name a file to write")
    if out.exists() and not overwrite:
        raise UsageError(f"{out} exists: choose another name, or --overwrite")
    if not out.parent.is_dir():
        raise UsageError(f"{out}: there is no directory {out.parent}")
