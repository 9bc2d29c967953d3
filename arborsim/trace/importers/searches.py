"""Searches that others recorded, as thoughts in batches, and the rows that these become."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from dataclasses import field as attribute
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.core.parquet import one_line
from arborsim.trace.importers.fields import MOST_TOKENS, Damage
from arborsim.trace.schema import End, Kind
from arborsim.trace.writer import WholeTraceWriter


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


#: Tokens of a character, by kind of text.  In GPT-4's Game of 24 log there are 138,989 pieces of
#: about cl100k's splitting pattern (a token or more each) in 225,183 characters.  English prose has
#: about four characters a token
RATES = {"game24": 0.62, "prose": 0.25}


@dataclass(frozen=True)
class Lengths:
    """Tokens of texts: sources that have text have no tokens."""

    tokens_per_character: float = RATES["game24"]  # 0 if it was not said
    #: A ``tokenizer.json``, or the folder it lies in, which counts instead; "" for none
    tokenizer: str = ""
    #: Of the prompt, of which the source has only the problem or nothing; 0: the problem's length
    prompt_tokens: int = 0
    thought_tokens: int = 0  # of each thought; 0: its text's length

    def of(self, written: str) -> int:
        """Tokens of a text, at least one."""
        if self.tokenizer:
            return max(1, len(_tokenizer(self.tokenizer).encode(written).ids))
        if not self.tokens_per_character:
            kinds = ", ".join(f"{name} ({rate:g})" for name, rate in RATES.items())
            raise UsageError(
                "the recording has text without numbers of tokens: count them with --tokenizer "
                f"FILE, or say a rate with --tokens-per-character, a number or one of {kinds}"
            )
        return max(1, round(len(written) * self.tokens_per_character))

    def said(self) -> str:
        """Where lengths are from, for the metadata."""
        if self.thought_tokens:
            return f"{self.thought_tokens} a thought, as asked for"
        if self.tokenizer:
            return f"texts by the tokenizer {Path(self.tokenizer).name}"
        return f"characters x {self.tokens_per_character:g}, rounded"

    def thought(self, written: str) -> int:
        return self.thought_tokens or self.of(written)

    def prompt(self, problem: str | None) -> int:
        if problem is None and not self.prompt_tokens:
            raise UsageError(
                "the recording does not hold its problems: give the length of the prompt with "
                "--prompt-tokens"
            )
        return self.prompt_tokens or self.of(problem or "")


@lru_cache(maxsize=1)
def _tokenizer(name: str) -> Any:
    """A tokenizer of the library ``tokenizers``, read from a file."""
    path = Path(name)
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UsageError(
            "--tokenizer needs the package tokenizers: pip install tokenizers"
        ) from None
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises plain exceptions
        raise UsageError(f"--tokenizer {path}: no tokenizer.json ({one_line(error)})") from None


#: Called with what was written, and its number of tokens.
Advance = Callable[[str, int], None]


class Imported(ABC):
    """An item of a source as one episode, or a `Damage` if it has too many tokens."""

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
    """One search, whatever format it came in, or a `Damage` if the prompt is empty."""

    prompt_tokens: int
    batches: Sequence[ThoughtBatch] = ()
    prompt_text: str | None = None
    answer: FinalAnswer | None = None
    algorithm: str = ""  # what searched, if that differs between sources of one format

    #: Whether every search is checked as a reader would check it, not only the first
    checked: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1:
            raise Damage("the prompt has no tokens")
        super().__post_init__()

    @cached_property
    def num_tokens(self) -> int:
        thoughts = (thought for batch in self.batches for thought in batch.thoughts)
        return self.prompt_tokens + sum(thought.tokens for thought in thoughts)

    @classmethod
    def write(cls, items: Sequence[Any], writer: WholeTraceWriter, advance: Advance) -> None:
        for number, search in enumerate(items):
            writer.write_episode(search.columns(), check=cls.checked or number == 0)
            advance(f"search {number}", search.num_tokens)

    def columns(self) -> dict[str, Any]:
        """The rows of the search, as `arborsim.trace.columns.encode` takes them.

        Thoughts of a batch take a token each per iteration until they are complete.  Token ids are
        null, and time stands still at 0, for no source here has either.
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
        #: Of each piece: its rows, kind, nodes, and iterations and positions (or one for all rows)
        self.pieces: list[tuple[int, Kind, np.ndarray, Any, Any]] = []
        self.thoughts: dict[int, Thought] = {}  # by row

    def add(
        self,
        kind: Kind,
        node: Any,
        position: Any = -1,
        thoughts: Sequence[Thought] = (),
        iteration: Any = None,
    ) -> None:
        """Append rows of one kind, of which the first are about `thoughts`."""
        node = np.asarray(node, dtype=np.int32)
        rows = len(node)
        if not rows:
            return
        at = self.iteration if iteration is None else iteration
        self.pieces.append((rows, kind, node, at, position))
        self.thoughts.update(enumerate(thoughts, self.count))
        self.count += rows

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
        rank = np.arange(len(leaf)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        if len(thoughts) > 1:  # side by side: a token of each, then the next of each
            order = np.argsort(rank, kind="stable")
            leaf, rank = leaf[order], rank[order]
        at = self.iteration + 1 + rank
        self.add(Kind.TOKEN, numbers[leaf], starts[leaf] + rank, iteration=at)
        self.iteration += int(lengths.max(initial=0))
        self.add(Kind.BOUNDARY, numbers, thoughts=thoughts)
        self.add(Kind.PRUNE, batch.pruned)

    def columns(self) -> dict[str, Any]:
        rows, kinds, nodes, iterations, positions = zip(*self.pieces, strict=True)
        lengths = np.array(rows)
        node = np.concatenate(nodes)
        found = {
            "kind": np.repeat(np.array(kinds, dtype=np.int8), lengths),
            "node": node,
            "iteration": _spread(iterations, lengths).astype(np.int32),
            "position": _spread(positions, lengths),
            "parent": np.asarray(self.parent, np.int32)[node],
            "depth": np.asarray(self.depth, np.int32)[node],
            "token": np.full(self.count, -1, dtype=np.int32),
            "time_s": np.zeros(self.count),
            "reward": np.full(self.count, np.nan, dtype=np.float32),
            "correct": np.full(self.count, -1, dtype=np.int8),
            "end": np.zeros(self.count, dtype=np.int8),
        }
        for name in ("reward", "correct", "end"):
            found[name][list(self.thoughts)] = [getattr(t, name) for t in self.thoughts.values()]
        for name in ("answer", "text", "embedding"):
            by_row = {row: getattr(thought, name) for row, thought in self.thoughts.items()}
            if any(value is not None for value in by_row.values()):
                found[name] = [by_row.get(row) for row in range(self.count)]
        return found


def _spread(values: Sequence[Any], lengths: np.ndarray) -> np.ndarray:
    """Pieces of a column, each an array or one number for all of its rows, int64 ``[rows]``."""
    single = [0 if isinstance(value, np.ndarray) else value for value in values]
    found = np.repeat(np.array(single, dtype=np.int64), lengths)
    for value, stop, length in zip(values, np.cumsum(lengths), lengths, strict=True):
        if isinstance(value, np.ndarray):
            found[stop - length : stop] = value
    return found
