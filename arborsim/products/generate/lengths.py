"""Searches drawn from stated distributions of lengths and trees, as traces.

A generated search is level-synchronous, as beam search, REBASE and tree-of-thoughts are: every
block that the search goes on from gets children.  The thoughts of a level are written side by side,
then a share of them is given up, a share of the others has finished, and the rest is expanded.  It
has lengths and structure, but no token ids, signals or seconds: policies may read what an imported
trace offers.

Distributions are of whole numbers: tokens of a prompt or thought, levels and branches of a tree.
In text (`--thought-tokens`, or a key of a workload file)::

    256                                     always that many
    uniform:low=64,high=512                 every whole number between them, both included
    lognormal:median=200,sigma=0.6          sigma is that of the logarithm, most=4096 caps it
    file:lengths.txt                        drawn from the numbers in a file, one a line
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from msgspec import Meta

from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.records import check_ranges, convert, located, read_text
from arborsim.core.settings import whole_number
from arborsim.products.generate.arrivals import Stream, stream
from arborsim.trace.importers.fields import MOST_TOKENS
from arborsim.trace.importers.searches import FinalAnswer, Thought, ThoughtBatch, WrittenSearch
from arborsim.trace.importers.sources import Contents, write_trace
from arborsim.trace.schema import Capture, Geometry, TraceInfo

#: Most thoughts of one level: more is a tree that nothing prunes.
MOST_THOUGHTS = 1 << 16
#: The distributions of a `TreeSpec`, and the largest number that each may give.
MOST = {
    "prompt_tokens": 1 << 20,  # longer than any model takes; every token becomes a row
    "thought_tokens": MOST_TOKENS,
    "depth": 1 << 12,
    "branching": MOST_THOUGHTS,
    "first": MOST_THOUGHTS,
}
# A distribution has a `text`, as a workload file states it, a `range` (the least and the largest
# number that can be drawn), and ``draw(rng, count)``: `count` independent numbers, int64 [count].


@dataclass(frozen=True)
class Uniform:
    """Every whole number from `low` to `high`, both included, equally likely."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise UsageError(f"low={self.low} is above high={self.high}")

    @property
    def text(self) -> str:
        one = self.low == self.high
        return str(self.low) if one else f"uniform:low={self.low},high={self.high}"

    @property
    def range(self) -> tuple[int, int]:
        return self.low, self.high

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return rng.integers(self.low, self.high, count, endpoint=True)


@dataclass(frozen=True)
class LogNormal:
    """``median * exp(sigma * z)`` with z standard normal, rounded, and held to ``1 .. most``."""

    median: Annotated[float, Meta(ge=1, le=MOST_TOKENS)]
    sigma: Annotated[float, Meta(ge=0, le=10)]
    most: int = MOST_TOKENS

    def __post_init__(self) -> None:
        check_ranges(self, "lognormal")
        if not self.median <= self.most:
            raise UsageError(f"most={self.most} is below median={self.median:g}")

    @property
    def text(self) -> str:
        cap = "" if self.most == MOST_TOKENS else f",most={self.most}"
        return f"lognormal:median={self.median:g},sigma={self.sigma:g}{cap}"

    @property
    def range(self) -> tuple[int, int]:
        return 1, self.most

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        drawn = self.median * np.exp(self.sigma * rng.standard_normal(count))
        return np.rint(np.clip(drawn, 1, self.most)).astype(np.int64)


@dataclass(frozen=True)
class Empirical:
    """Drawn, with replacement, from `values`. `origin` names where they are from."""

    values: tuple[int, ...]
    origin: str = ""

    def __post_init__(self) -> None:
        if not self.values:
            raise UsageError("there is no number to draw from")

    @property
    def text(self) -> str:
        return f"file:{self.origin}" if self.origin else f"one of {len(self.values)} numbers"

    @property
    def range(self) -> tuple[int, int]:
        return min(self.values), max(self.values)

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return np.asarray(self.values, dtype=np.int64)[rng.integers(0, len(self.values), count)]


Counts = Uniform | LogNormal | Empirical
_FORMS: dict[str, type[Uniform | LogNormal]] = {"uniform": Uniform, "lognormal": LogNormal}


def fixed(value: int) -> Uniform:
    """Always the same number. Nothing is drawn for it."""
    return Uniform(value, value)


def parse_counts(given: object, what: str, base: Path = Path()) -> Counts:
    """A distribution from a number, a list of numbers or a text, or a `UsageError` about `what`.

    `base` is the folder that ``file:`` starts from.
    """
    with located(what):
        if isinstance(given, list):
            return Empirical(convert(tuple[int, ...], given, "its numbers:"))
        if not isinstance(given, str):
            return fixed(convert(int, given, "it"))
        form, colon, rest = given.strip().partition(":")
        if form == "file" and colon:
            return _from_file(base / rest.strip())
        if colon:
            if form not in _FORMS:
                raise UnknownName("distribution", form, [*_FORMS, "file"])
            return convert(_FORMS[form], _parameters(form, rest), form)
        try:
            return fixed(whole_number(form))
        except ValueError:
            raise UsageError(
                f"'{given:.40}' is no distribution: give a whole number, uniform:low=64,high=512, "
                "lognormal:median=200,sigma=0.6 or file:NAME"
            ) from None


def check_range(found: Counts, what: str, most: int) -> None:
    """Refuse a distribution that can give numbers outside of ``1 .. most``."""
    least, largest = found.range
    if least < 1 or largest > most:
        drawn = f"{least}" if least == largest else f"{least} to {largest}"
        cap = ": set most" if isinstance(found, LogNormal) else ""
        raise UsageError(f"{what} must be in [1, {most}], not {drawn}{cap}")


def _parameters(form: str, text: str) -> dict[str, object]:
    """``"median=200,sigma=0.6"`` as a table."""
    values: dict[str, object] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise UsageError(f"'{part:.40}' in {form}: expected name=value")
        if key in values:
            raise UsageError(f"{form} has {key} twice")
        values[key] = _number(value)
    return values


def _number(text: str) -> int | float | str:
    """The number that a text is. The text itself if it is none."""
    for kind in (int, float, whole_number):
        with suppress(ValueError):
            return kind(text)
    return text


def _from_file(path: Path) -> Empirical:
    lines = (line.partition("#")[0].strip() for line in read_text(path).splitlines())
    where = ((f"{path}, line {number},", text) for number, text in enumerate(lines, 1) if text)
    values = [convert(int, _number(text), line) for line, text in where]
    if not values:
        raise UsageError(f"{path} holds no number")
    return Empirical(tuple(values), path.name)


_ONE = fixed(1)


@dataclass(frozen=True)
class TreeSpec:
    """The distributions that searches are drawn from. Refuses what no trace can hold.

    Best-of-N is ``first=N`` with ``branching=1``, a beam of width k out of N is ``first=N,
    branching=N/k, pruned=1-k/N``, a chain has ``branching=1``.
    """

    #: Tokens of the prompt, and of each thought.
    prompt_tokens: Counts
    thought_tokens: Counts
    depth: Counts = _ONE  #: levels of thoughts, drawn once per search
    branching: Counts = _ONE  #: children of each block that the search goes on from
    first: Counts | None = None  #: children of the prompt; as `branching` if None
    #: Share of each level's thoughts that is given up; the last entry holds for all deeper levels.
    #: One thought always stays, and the last level is not pruned: the search ends there.
    pruned: tuple[float, ...] = (0.0,)
    #: Share of the thoughts that stay which hold an answer and are not expanded, in the same way.
    finished: tuple[float, ...] = (0.0,)
    parallel: int = 0  #: most thoughts that are decoded side by side; 0 for a whole level
    #: Draw rewards uniformly from [0, 1): those with the lowest are given up, and the finished
    #: thought with the highest is the answer. Without, both are drawn.
    rewards: bool = False
    solved: float | None = None  #: share of searches whose answer is correct; None if unknown

    def __post_init__(self) -> None:
        for name, counts in self._counts().items():
            check_range(counts, name, MOST[name])
        for name in ("pruned", "finished"):
            shares = getattr(self, name)
            if not shares or not all(0 <= share <= 1 for share in shares):
                raise UsageError(f"{name} must be shares in [0, 1], not {list(shares)}")
        if self.parallel < 0:
            raise UsageError(f"parallel must not be negative, not {self.parallel}")
        if self.solved is not None and not 0 <= self.solved <= 1:
            raise UsageError(f"solved must be a share in [0, 1], not {self.solved:g}")

    def _counts(self) -> dict[str, Counts]:
        return {name: getattr(self, name) or self.branching for name in MOST}

    def parameters(self) -> dict[str, object]:
        """Everything that was stated, for the trace's metadata."""
        return {
            **{name: counts.text for name, counts in self._counts().items()},
            "pruned": list(self.pruned),
            "finished": list(self.finished),
            "parallel": self.parallel,
            "rewards": "uniform" if self.rewards else "none",
            "solved": self.solved,
        }


class DrawnSearch(WrittenSearch):
    """A search whose tree is right by construction: readers check it, the writer need not."""

    checked: ClassVar[bool] = False


def generate_search(spec: TreeSpec, seed: int, number: int) -> DrawnSearch:
    """Search `number` of a seed: the same however many are drawn.

    Refuses a tree that grows beyond `MOST_THOUGHTS` on a level or `MOST_TOKENS` in all.
    """
    rng = stream(seed, Stream.SEARCHES, number)
    prompt = int(spec.prompt_tokens.draw(rng, 1)[0])
    batches, answer = _Tree(spec, rng, prompt).grow()
    return DrawnSearch(prompt, batches, answer=answer)


class _Tree:
    """A search while it is drawn, level by level."""

    def __init__(self, spec: TreeSpec, rng: np.random.Generator, prompt_tokens: int) -> None:
        self._spec, self._rng = spec, rng
        self._batches: list[ThoughtBatch] = []
        self._tokens = prompt_tokens
        self._finished: list[int] = []
        self._rewards = [float("nan")]  # of each block so far, the prompt included

    def grow(self) -> tuple[list[ThoughtBatch], FinalAnswer]:
        depth = int(self._spec.depth.draw(self._rng, 1)[0])
        frontier = np.zeros(1, dtype=np.int64)
        for level in range(depth):
            last = level == depth - 1
            nodes = self._level(frontier, level, last)
            count = 0 if last else self._number(len(nodes), self._spec.finished, level)
            ended = nodes if last else self._some(nodes, count)
            self._finished += ended.tolist()
            frontier = np.setdiff1d(nodes, ended, assume_unique=True)
            if len(frontier) == 0:
                break
        return self._batches, self._answer()

    def _level(self, frontier: np.ndarray, level: int, last: bool) -> np.ndarray:
        """Write the children of the frontier. Returns the numbers of those that stay."""
        spec, rng = self._spec, self._rng
        per_block = spec.first if level == 0 and spec.first else spec.branching
        children = per_block.draw(rng, len(frontier))
        _check_size(level, int(children.sum()), MOST_THOUGHTS, "thoughts")
        parents = np.repeat(frontier, children)
        tokens = spec.thought_tokens.draw(rng, len(parents))
        self._tokens += int(tokens.sum())
        _check_size(level, self._tokens, MOST_TOKENS, "tokens down to it")
        nodes = np.arange(len(parents)) + len(self._rewards)
        rewards = rng.random(len(nodes)) if spec.rewards else np.full(len(nodes), np.nan)
        self._rewards += rewards.tolist()
        pruned = nodes[:0] if last else self._pruned(nodes, rewards, level)
        thoughts = list(map(Thought, parents.tolist(), tokens.tolist(), rewards.tolist()))
        width = spec.parallel or len(thoughts)
        batches = [thoughts[start : start + width] for start in range(0, len(thoughts), width)]
        self._batches += [ThoughtBatch(each, ()) for each in batches[:-1]]
        # A level is judged when all of it is there.
        self._batches.append(ThoughtBatch(batches[-1], pruned.tolist()))
        return np.setdiff1d(nodes, pruned, assume_unique=True)

    def _pruned(self, nodes: np.ndarray, rewards: np.ndarray, level: int) -> np.ndarray:
        count = min(self._number(len(nodes), self._spec.pruned, level), len(nodes) - 1)
        if self._spec.rewards:
            return np.sort(nodes[np.argsort(rewards, kind="stable")[:count]])
        return self._some(nodes, count)

    def _some(self, nodes: np.ndarray, count: int) -> np.ndarray:
        """That number of the nodes, drawn, in order."""
        if not count:  # as on most levels; nothing is drawn for it either way
            return nodes[:0]
        return np.sort(self._rng.choice(nodes, count, replace=False))

    def _number(self, blocks: int, shares: tuple[float, ...], level: int) -> int:
        """A level's share of a number of blocks, whole: rounded so that the mean is exact."""
        whole = shares[min(level, len(shares) - 1)] * blocks
        nearest = round(whole)
        if abs(whole - nearest) < 1e-9:  # 0.1 x 30 is 3, whatever binary fractions make of it
            return nearest
        return int(whole + self._rng.random())

    def _answer(self) -> FinalAnswer:
        spec, rng = self._spec, self._rng
        node = max(self._finished, key=self._rewards.__getitem__)
        if not spec.rewards:
            node = self._finished[int(rng.integers(len(self._finished)))]
        correct = -1 if spec.solved is None else int(rng.random() < spec.solved)
        return FinalAnswer(node, correct)


def _check_size(level: int, count: int, most: int, what: str) -> None:
    if count > most:
        raise UsageError(
            f"level {level + 1} of a tree has {count} {what}, more than {most}: give up a larger "
            "share (pruned), or lower lengths, branching or depth"
        )


def generated_info(
    parameters: dict[str, object],
    seed: int,
    geometry: Geometry,
    command: str = "",
    bank: bool = False,
) -> TraceInfo:
    """Metadata of a generated trace: what was stated, and what is unknown."""
    return TraceInfo(
        geometry=geometry,
        model=f"none: {'thoughts' if bank else 'lengths'} are drawn; charged as {geometry.name}",
        task="generated",
        search="bank" if bank else "generated",
        search_parameters=parameters,
        seed=seed,
        capture=Capture.TREE,
        embeddings=bank,
        command=command,
        extra={"generated": True, "token_ids": "unknown", "times": "unknown"},
    )


def write_generated(
    spec: TreeSpec,
    searches: int,
    seed: int,
    geometry: Geometry,
    out: Path,
    overwrite: bool = False,
    command: str = "",
    advance: Callable[[str, int], None] = lambda what, units: None,
) -> int:
    """Draw searches and write them as a trace, whole or not at all. Returns their tokens.

    Replays charge for a model of this geometry unless they are given another.  `advance` is called
    with what was written and its number of tokens.
    """
    drawn = tuple(generate_search(spec, seed, number) for number in range(searches))
    info = generated_info(spec.parameters(), seed, geometry, command)
    write_trace(Contents(drawn, (), searches), info, out, overwrite, advance)
    return sum(search.num_tokens for search in drawn)
