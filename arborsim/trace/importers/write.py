"""A search as batches of thoughts, the rows of a trace that it becomes, and the trace itself.

A trace is written whole or not at all, and its metadata says what its source did not know.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.core.geometry import Geometry
from arborsim.trace.importers.sources import MOST_TOKENS, Contents, Damage
from arborsim.trace.schema import Capture, End, Kind, TraceInfo
from arborsim.trace.writer import WholeTraceWriter

#: `Description.extra` of a source that does not tell which thoughts ended (`TraceInfo.knows_ends`).
NO_ENDS = {"ends": "unknown"}


@dataclass(frozen=True)
class Thought:
    """A thought block.

    Attributes
    ----------
    parent : int
        Number of the block above; 0 is the prompt, and thoughts count from 1 in batch order.
    tokens : int
    reward : float
        In [0, 1]; NaN for none.
    text : str or None
    correct : int
        1, 0, or -1 for "not judged".
    end : End
    answer : str or None
        Only of finished thoughts.
    """

    parent: int
    tokens: int
    reward: float = math.nan
    text: str | None = None
    correct: int = -1
    end: End = End.NONE
    answer: str | None = None


@dataclass(frozen=True)
class ThoughtBatch:
    """Thoughts that are decoded together, and the blocks given up afterwards."""

    thoughts: Sequence[Thought]
    pruned: Sequence[int] = ()


@dataclass(frozen=True)
class FinalAnswer:
    """How a search ended: the chosen leaf, the verdict (1, 0 or -1), and the text."""

    node: int
    correct: int
    text: str | None = None


@dataclass
class _Rows:
    """Columns in the making: pieces of equal length, and single values that are no numbers."""

    kind: list[np.ndarray] = field(default_factory=list)
    node: list[np.ndarray] = field(default_factory=list)
    iteration: list[np.ndarray] = field(default_factory=list)
    position: list[np.ndarray] = field(default_factory=list)
    reward: dict[int, float] = field(default_factory=dict)
    correct: dict[int, int] = field(default_factory=dict)
    text: dict[int, str | None] = field(default_factory=dict)
    end: dict[int, End] = field(default_factory=dict)
    answer: dict[int, str | None] = field(default_factory=dict)
    count: int = 0

    def add(self, kind: Kind, node: Any, iteration: Any, position: Any = -1) -> int:
        """Append rows of one kind; returns the number of the first."""
        nodes = np.atleast_1d(np.asarray(node, dtype=np.int32))
        first, size = self.count, len(nodes)
        self.kind.append(np.full(size, kind, dtype=np.int8))
        self.node.append(nodes)
        self.iteration.append(np.broadcast_to(np.asarray(iteration, np.int32), size))
        self.position.append(np.broadcast_to(np.asarray(position, np.int32), size))
        self.count += size
        return first


@dataclass(frozen=True)
class WrittenSearch:
    """One search, whatever format it came in.

    Attributes
    ----------
    prompt_tokens : int
    batches : sequence of ThoughtBatch
    prompt_text : str or None
    answer : FinalAnswer or None

    Raises
    ------
    Damage
        The prompt is empty, or there are more tokens than a trace's reader should have to hold.
    """

    prompt_tokens: int
    batches: Sequence[ThoughtBatch] = ()
    prompt_text: str | None = None
    answer: FinalAnswer | None = None

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1:
            raise Damage("the prompt has no tokens")
        if self.num_tokens > MOST_TOKENS:
            raise Damage(f"it has {self.num_tokens} tokens, more than {MOST_TOKENS}")

    @property
    def num_tokens(self) -> int:
        thoughts = (thought for batch in self.batches for thought in batch.thoughts)
        return self.prompt_tokens + sum(thought.tokens for thought in thoughts)

    def columns(self) -> dict[str, Any]:
        """Columns for `arborsim.trace.writer.TraceWriter.write_episode`.

        Thoughts of a batch take a token each per iteration until they are complete; no token ids
        (null), and time stands still at 0, for no source here has either.
        """
        rows = _Rows()
        first = rows.add(
            Kind.PREFILL, np.zeros(self.prompt_tokens), 0, np.arange(self.prompt_tokens)
        )
        rows.text[first] = self.prompt_text
        parent, depth, ends = [-1], [0], [self.prompt_tokens]
        iteration = 0
        for batch in self.batches:
            iteration = _add_batch(rows, batch, iteration, parent, depth, ends)
        if self.answer is not None:
            last = rows.add(Kind.ANSWER, self.answer.node, iteration)
            rows.correct[last], rows.text[last] = self.answer.correct, self.answer.text
        return _columns(rows, np.asarray(parent, np.int32), np.asarray(depth, np.int32))


def _add_batch(
    rows: _Rows,
    batch: ThoughtBatch,
    iteration: int,
    parent: list[int],
    depth: list[int],
    ends: list[int],
) -> int:
    """The rows of a batch; `parent`, `depth` and path lengths `ends` grow by its thoughts."""
    thoughts = batch.thoughts
    numbers = np.arange(len(parent), len(parent) + len(thoughts))
    starts = np.asarray([ends[thought.parent] for thought in thoughts], dtype=np.int64)
    for thought in thoughts:
        parent.append(thought.parent)
        depth.append(depth[thought.parent] + 1)
        ends.append(ends[thought.parent] + thought.tokens)
    rows.add(Kind.TRANSITION, numbers, iteration)
    lengths = np.asarray([thought.tokens for thought in thoughts], dtype=np.int64)
    leaf = np.repeat(np.arange(len(thoughts)), lengths)
    rank = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    order = np.lexsort((leaf, rank))
    leaf, rank = leaf[order], rank[order]
    rows.add(Kind.TOKEN, numbers[leaf], iteration + 1 + rank, starts[leaf] + rank)
    iteration += int(lengths.max(initial=0))
    first = rows.add(Kind.BOUNDARY, numbers, iteration)
    for row, thought in enumerate(thoughts, first):
        rows.reward[row], rows.text[row] = thought.reward, thought.text
        rows.correct[row] = thought.correct
        rows.end[row], rows.answer[row] = thought.end, thought.answer
    rows.add(Kind.PRUNE, np.asarray(batch.pruned, dtype=np.int32), iteration)
    return iteration


def _columns(rows: _Rows, parent: np.ndarray, depth: np.ndarray) -> dict[str, Any]:
    node = np.concatenate(rows.node)
    reward = np.full(rows.count, np.nan, dtype=np.float32)
    reward[list(rows.reward)] = list(rows.reward.values())
    correct = np.full(rows.count, -1, dtype=np.int8)
    correct[list(rows.correct)] = list(rows.correct.values())
    end = np.zeros(rows.count, dtype=np.int8)
    end[list(rows.end)] = list(rows.end.values())
    columns: dict[str, Any] = {
        "kind": np.concatenate(rows.kind),
        "iteration": np.concatenate(rows.iteration),
        "node": node,
        "parent": parent[node],
        "depth": depth[node],
        "position": np.concatenate(rows.position),
        "token": np.full(rows.count, -1, dtype=np.int32),
        "time_s": np.zeros(rows.count),
        "reward": reward,
        "correct": correct,
        "end": end,
    }
    if any(answer is not None for answer in rows.answer.values()):
        columns["answer"] = [rows.answer.get(row) for row in range(rows.count)]
    if any(text is not None for text in rows.text.values()):
        columns["text"] = [rows.text.get(row) for row in range(rows.count)]
    return columns


@dataclass(frozen=True)
class Description:
    """What a format says about its searches, for the trace's metadata.

    Attributes
    ----------
    format, task, search, lengths : str
        `lengths` says where the numbers of tokens are from.
    parameters : dict
        Options of the import.
    extra : dict
    """

    format: str
    task: str
    search: str
    lengths: str
    parameters: dict[str, Any]
    extra: dict[str, Any]


def refuse_damage(path: Path, contents: Contents) -> None:
    """Raise a `UsageError` that names the first damaged item, and counts all."""
    if not contents.damaged:
        return
    first, count = contents.damaged[0], len(contents.damaged)
    if not contents.searches:
        raise UsageError(f"{path}, {first.place}: {first.what}; {_nothing(contents)}")
    also = f" ({count} of {contents.items} are damaged)" if count > 1 else ""
    raise UsageError(
        f"{path}, {first.place}: {first.what}{also}; repair the file, or leave out what is "
        "damaged with --on-damage skip"
    )


def _nothing(contents: Contents) -> str:
    """What to do about a source of which no item could be read."""
    items = "its only item is" if contents.items == 1 else f"all {contents.items} items are"
    return (
        f"{items} unreadable as this format: is it the right file, and the right one of "
        "`arborsim import --help`?"
    )


def trace_info(
    path: Path, about: Description, contents: Contents, geometry: Geometry, command: str = ""
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
        "left_out": [f"{damaged.place}: {damaged.what}" for damaged in contents.damaged],
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
    contents: Contents,
    info: TraceInfo,
    out: Path,
    overwrite: bool = False,
    advance: Callable[[str, int], None] = lambda what, units: None,
) -> None:
    """Write the searches to `out`, which appears when all of them are written.

    Parameters
    ----------
    contents : Contents
    info : TraceInfo
    out : Path
    overwrite : bool
        Replace `out`.
    advance : callable
        Called with what was written and its number of tokens.

    Raises
    ------
    UsageError
        `out` exists, cannot be written, or there is no search to write.
    """
    check_out(out, overwrite)
    if not contents.searches:
        raise UsageError(f"nothing to import: {_nothing(contents)}")
    scrap = out.with_name(f".{out.name}.import")
    try:
        with WholeTraceWriter(scrap, info) as writer:
            for number, search in enumerate(contents.searches):
                writer.write_episode(search.columns())
                advance(f"search {number}", search.num_tokens)
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
