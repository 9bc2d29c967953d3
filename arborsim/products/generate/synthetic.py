"""Synthetic banks: thoughts of stated depth, rewards, meanings and lengths, for searches to walk.

A bank of a real model is as deep as its task.  This one is as deep and wide as is stated, so that
searches can be compared by depth and width.  Every thought has as many children as are asked for:
they are drawn when a search asks, from a seed and the path to them, so that a thought is the same
whichever search comes first, and nothing is stored that no search visits.

*Rewards.*  A thought has a hidden quality z, standard normal, with z = r z(parent) + sqrt(1 - r^2)
noise.  Those of the first level are independent.  Its reward is Phi(z), uniform on [0, 1], brought
to [0.5 - spread / 2, 0.5 + spread / 2].  r is chosen so that rewards of parent and child have just
the stated Pearson (and Spearman) correlation: that of Phi of two normals is 6 / pi asin(r / 2).

*Answers.*  A thought of the last level holds an answer, and so does a share of the others.  It is
right where t z + sqrt(d) difficulty + sqrt(1 - t^2 - d) noise exceeds a threshold, which is such
that the stated share is right over all problems.  t, the *truth* of rewards, is the biserial
correlation of a last thought's reward (as normal score) with being right.  `difficulty` is the same
for all thoughts of a problem.  Wrong answers are one of a few texts, equally often.

*Meanings.*  The children of a thought say one of a few things each, in different words: embeddings
of one meaning lie within ETS's cut of 0.05, those of two meanings far apart.  A meaning is *common*
(all thoughts of this level may have it) or the children's own.  A child may also *repeat* an older
sibling word for word: then it has its length, reward, embedding and answer, but other children.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.core.geometry import Geometry
from arborsim.products.generate.arrivals import Stream
from arborsim.products.generate.lengths import MOST, Counts, check_range, generated_info
from arborsim.searches.arms import Recipe
from arborsim.searches.bank import Thoughts
from arborsim.searches.growing import MOST_NODES
from arborsim.searches.walk import walk
from arborsim.trace.importers.fields import MOST_TOKENS
from arborsim.trace.importers.searches import FinalAnswer, Thought, ThoughtBatch, WrittenSearch
from arborsim.trace.importers.sources import Contents, write_trace
from arborsim.trace.schema import End

SIZE = 32  #: numbers of an embedding
#: Length of what wording adds to a meaning of length 1: two wordings are about 0.02 apart.
WORDING = 0.15
_BLOCK = 4  # children that are drawn at a time; part of every bank, as seeds are
_IDEAS = 1 << 32  # in a seed, in the place of the number of a block


@dataclass(frozen=True)
class BankSpec:
    """The distributions that thoughts are drawn from. Refuses what cannot be."""

    #: Tokens of the prompt, and of each thought.
    prompt_tokens: Counts
    thought_tokens: Counts
    depth: Counts  #: levels of thoughts, drawn once per problem
    #: Share of each level's thoughts that hold an answer; the last entry holds for all deeper
    #: levels but the last level, where all do.
    finished: tuple[float, ...] = (0.0,)
    reward_correlation: float = 0.8  #: of a thought's reward with its parent's, in [0, 1]
    reward_spread: float = 1.0  #: width of the interval of rewards around 0.5, in [0, 1]
    truth: float = 0.5  #: how well last rewards tell right answers, in [0, 1]
    difficulty: float = 0.3  #: share of what decides about answers that a problem's paths share
    right: float = 0.5  #: share of answers that are right, over all problems, in (0, 1)
    wrong_answers: int = 8  #: different wrong answers of a problem
    meanings: int = 4  #: of a thought's children; 0 for one of its own for each
    common: float = 0.5  #: share of meanings that all thoughts of a level may have
    repeated: float = 0.0  #: share of children, after the first, that repeat an older sibling

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "thought_tokens", "depth"):
            check_range(getattr(self, name), name, MOST[name])
        rewards = ("reward_correlation", "reward_spread", "truth", "difficulty")
        for name in (*rewards, "common", "repeated"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} must be in [0, 1], not {getattr(self, name):g}")
        if not self.finished or not all(0 <= share <= 1 for share in self.finished):
            raise UsageError(f"finished must be shares in [0, 1], not {list(self.finished)}")
        if not 0 < self.right < 1:
            raise UsageError(f"right must be a share between 0 and 1, not {self.right:g}")
        if self.truth**2 + self.difficulty > 1:
            raise UsageError(
                f"truth {self.truth:g} squared and difficulty {self.difficulty:g} are more than 1 "
                "together: lower one of them"
            )
        if self.wrong_answers < 1 or self.meanings < 0:
            raise UsageError("wrong answers must be 1 or more, and meanings 0 or more")

    def parameters(self) -> dict[str, object]:
        """Everything that was stated, for the trace's metadata."""
        lengths = ("prompt_tokens", "thought_tokens", "depth")
        found: dict[str, object] = {name: getattr(self, name).text for name in lengths}
        others = {name: value for name, value in vars(self).items() if name not in lengths}
        return found | others | {"finished": list(self.finished)}


@dataclass(frozen=True, eq=False)
class SyntheticBank(Thoughts):
    """The thoughts of one problem. They grow as searches ask for them (`below`)."""

    spec: BankSpec = field(kw_only=True)
    #: The problem's number, after its seed.
    origin: tuple[int, int] = field(kw_only=True)
    levels: int = field(kw_only=True)
    difficulty: float = field(kw_only=True)  #: standard normal: above 0 is easier
    asked: list[int] = field(kw_only=True)  #: children of each node that were asked for
    _drawn: list[list[int]] = field(kw_only=True)  # children of each node, asked for or not
    _path: list[tuple[int, ...]] = field(kw_only=True)  # numbers of children, from the prompt on
    _quality: list[float] = field(kw_only=True)
    _ideas: dict[tuple[int, ...], np.ndarray] = field(kw_only=True)

    @classmethod
    def of(cls, spec: BankSpec, seed: int, number: int) -> SyntheticBank:
        """Problem `number` of a seed: the same whichever searches walk it."""
        rng = _generator(seed, number, 0)
        prompt, levels = (int(n.draw(rng, 1)[0]) for n in (spec.prompt_tokens, spec.depth))
        drawn: list[list[int]] = [[]]
        nothing = {name: [None] for name in ("answer", "verdict", "text")}
        unknown = {name: [math.nan] for name in ("score", "entropy", "logprob", "_quality")}
        made: dict[str, Any] = nothing | unknown | {"children": drawn, "_drawn": drawn}
        return cls(
            parent=[-1],
            depth=[0],
            tokens=[prompt],
            complete=[True],
            end=[End.NONE],
            twin=[0],
            judged=True,
            embedding={},
            spec=spec,
            origin=(seed, number),
            levels=levels,
            difficulty=rng.standard_normal(),
            asked=[0],
            _path=[()],
            _ideas={},
            **made,
        )

    def below(self, node: int, first: int, count: int) -> Sequence[int]:
        """`count` children of `node` from number `first` on: there always are."""
        self.asked[node] = max(self.asked[node], first + count)
        while len(self._drawn[node]) < first + count:
            self._draw(node)
        return self._drawn[node][first : first + count]

    def _draw(self, node: int) -> None:
        """Draw the next few children of a node."""
        from scipy.special import ndtr, ndtri  # slow to import

        spec, path, level = self.spec, self._path[node], self.depth[node] + 1
        first = len(self._drawn[node])
        rng = _generator(*self.origin, level, *path, first // _BLOCK)
        noise, truth = rng.standard_normal((2, _BLOCK))
        r = 2 * math.sin(math.pi * spec.reward_correlation / 6)
        quality = noise if level == 1 else r * self._quality[node] + math.sqrt(1 - r * r) * noise
        reward = (0.5 + spec.reward_spread * (ndtr(quality) - 0.5)).astype(np.float32)
        tokens = spec.thought_tokens.draw(rng, _BLOCK)
        share = spec.finished[min(level - 1, len(spec.finished) - 1)]
        finished = (rng.random(_BLOCK) < share) | (level == self.levels)
        t, d = spec.truth, spec.difficulty
        merit = t * quality + math.sqrt(d) * self.difficulty + math.sqrt(1 - t * t - d) * truth
        right = merit > ndtri(1 - spec.right)
        wrong = rng.integers(spec.wrong_answers, size=_BLOCK)
        embedding = self._embeddings(node, rng)
        repeats, which = rng.random(_BLOCK) < spec.repeated, rng.random(_BLOCK)
        for i in range(_BLOCK):
            child, rank = len(self.parent), first + i
            self.parent.append(node)
            self.depth.append(level)
            self.complete.append(True)
            self.entropy.append(math.nan)  # type: ignore[attr-defined]
            self.logprob.append(math.nan)  # type: ignore[attr-defined]
            self.asked.append(0)
            self._path.append((*path, rank))
            if repeats[i] and rank:
                self._repeat(child, self._drawn[node][int(which[i] * rank)])
            else:
                said = "right" if right[i] else f"wrong {wrong[i]}"
                values = int(tokens[i]), float(quality[i]), float(reward[i]), embedding[i]
                self._say(child, *values, f"thought {rank}", said if finished[i] else None)
            self._drawn[node].append(child)
            self._drawn.append([])

    def _say(
        self,
        child: int,
        tokens: int,
        quality: float,
        reward: float,
        embedding: np.ndarray,
        text: str | None,
        answer: str | None,
        twin: int = -1,
    ) -> None:
        self.tokens.append(tokens)
        self._quality.append(quality)
        self.score.append(reward)
        self.embedding[child] = embedding  # type: ignore[index]
        self.text.append(text)  # type: ignore[attr-defined]
        self.answer.append(answer)  # type: ignore[attr-defined]
        self.end.append(End.NONE if answer is None else End.FINISHED)
        self.verdict.append(None if answer is None else answer == "right")
        self.twin.append(child if twin < 0 else twin)

    def _repeat(self, child: int, older: int) -> None:
        said = self.text[older], self.answer[older], self.twin[older]
        quality, reward = self._quality[older], self.score[older]
        self._say(child, self.tokens[older], quality, reward, self.embedding[older], *said)

    def _embeddings(self, node: int, rng: np.random.Generator) -> np.ndarray:
        """Embeddings of the next few children. Float16 ``[children, SIZE]``."""
        wording = WORDING / math.sqrt(SIZE) * rng.standard_normal((_BLOCK, SIZE))
        if not self.spec.meanings:
            return (_directions(rng, _BLOCK) + wording).astype(np.float16)
        said = rng.integers(self.spec.meanings, size=_BLOCK)
        return (self._meanings(node)[said] + wording).astype(np.float16)

    def _meanings(self, node: int) -> np.ndarray:
        """Meanings that the children of a node may have. Float64 ``[meanings, SIZE]``."""
        path, level = self._path[node], self.depth[node] + 1
        if path not in self._ideas:
            rng = _generator(*self.origin, level, *path, _IDEAS)
            own = _directions(rng, self.spec.meanings)
            level_rng = _generator(*self.origin, 0, level)
            shared = _directions(level_rng, self.spec.meanings)
            common = rng.random((self.spec.meanings, 1)) < self.spec.common
            self._ideas[path] = np.where(common, shared, own)
        return self._ideas[path]


def _generator(*words: int) -> np.random.Generator:
    """The generator of a seed, a problem, a level, and what there is to draw on it."""
    seed, number, level, *rest = words
    key = (int(Stream.BANKS), number, level, len(rest), *rest)
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


def _directions(rng: np.random.Generator, count: int) -> np.ndarray:
    """Vectors of length 1, float64 ``[count, SIZE]``."""
    drawn = rng.standard_normal((count, SIZE))
    found: np.ndarray = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    return found


@dataclass(frozen=True)
class Dense:
    """Which thoughts a bank for any search holds: a number of children of every thought."""

    first: Counts  #: of the prompt
    branching: Counts  #: of the others

    def __post_init__(self) -> None:
        for name in ("first", "branching"):
            check_range(getattr(self, name), name, MOST[name])

    def parameters(self) -> dict[str, Any]:
        return {"first": self.first.text, "branching": self.branching.text}


def grow(bank: SyntheticBank, recipe: Recipe | Dense) -> None:
    """Ask for every thought that the bank is to hold. Refuses a tree that is too large."""
    if isinstance(recipe, Recipe):
        for arm in recipe.arms:
            walk(arm.make(), bank, recipe.dedupe)
        return
    rng = _generator(*bank.origin, 0, 0)
    level, nodes = [0], 0
    while level:
        wanted = (recipe.branching if nodes else recipe.first).draw(rng, len(level))
        depth, before = bank.depth[level[0]] + 1, nodes
        nodes += int(wanted.sum())
        for further, count in enumerate(_ahead(bank, recipe.branching, depth, nodes - before)):
            if before + count > MOST_NODES:  # before they are drawn, which takes long
                raise UsageError(
                    f"level {depth + further} of a bank brings it to {before + count:.0f} thoughts "
                    f"or more, more than {MOST_NODES}: lower branching or depth, or name the "
                    "searches (--for)"
                )
        below = [
            child
            for node, count in zip(level, wanted.tolist(), strict=True)
            for child in bank.below(node, 0, count)
        ]
        level = [node for node in below if bank.end[node] == End.NONE]


def _ahead(bank: SyntheticBank, branching: Counts, level: int, count: int) -> Iterator[float]:
    """Thoughts from `level` on, which has `count`, down to it and to each level below, at least.

    Where there are a thousand thoughts, half of what is to be expected of them is sure.
    """
    mean = float(branching.draw(np.random.default_rng(0), 1000).mean())
    least = sure = expected = likely = float(count)
    yield least
    for each in range(level, bank.levels):
        share = bank.spec.finished[min(each - 1, len(bank.spec.finished) - 1)]
        least *= 0 if share else branching.range[0]
        expected *= (1 - share) * mean
        sure, likely = sure + least, likely + expected
        found = max(sure, likely / 2 if min(count, expected) >= 1000 else 0.0)
        yield found
        if found > MOST_NODES or not least + expected:
            return


def written(bank: SyntheticBank) -> WrittenSearch:
    """The thoughts that were asked for, level by level."""
    batches, level = [], [(0, 0)]  # a node, and its number in the trace
    count, tokens = 1, bank.tokens[0]
    finished: list[tuple[bool, float, int]] = []
    while level:
        below = [
            (up, child) for node, up in level for child in bank.below(node, 0, bank.asked[node])
        ]
        if not below:
            break
        batches.append(ThoughtBatch([_thought(bank, up, child) for up, child in below]))
        level = [(child, number) for number, (_, child) in enumerate(below, count)]
        finished += [
            (bool(bank.verdict[child]), bank.score[child], -number)
            for child, number in level
            if bank.end[child] == End.FINISHED
        ]
        count += len(below)
        tokens += sum(bank.tokens[child] for child, _ in level)
        if tokens > MOST_TOKENS:
            raise UsageError(
                f"problem {bank.origin[1]} has more than {MOST_TOKENS} tokens: lower lengths, "
                "width, branching or depth"
            )
    right, _, number = max(finished, default=(False, 0.0, 0))
    return WrittenSearch(bank.tokens[0], batches, answer=FinalAnswer(-number, int(right)))


def _thought(bank: SyntheticBank, parent: int, node: int) -> Thought:
    verdict = bank.verdict[node]
    said = bank.tokens[node], bank.score[node], bank.text[node]
    judged = -1 if verdict is None else int(verdict), End(bank.end[node]), bank.answer[node]
    return Thought(parent, *said, *judged, bank.embedding[node])


def write_synthetic(
    spec: BankSpec,
    recipe: Recipe | Dense,
    problems: int,
    seed: int,
    geometry: Geometry,
    out: Path,
    overwrite: bool = False,
    command: str = "",
    advance: Callable[[str, int], None] = lambda what, units: None,
) -> int:
    """Draw banks and write them as a trace that searches walk. Returns its tokens."""
    found = []
    for number in range(problems):
        bank = SyntheticBank.of(spec, seed, number)
        grow(bank, recipe)
        found.append(written(bank))
        advance(f"problem {number}", found[-1].num_tokens)
    parameters = spec.parameters() | recipe.parameters()
    info = generated_info(parameters, seed, geometry, command, bank=True)
    write_trace(Contents(tuple(found), (), problems), info, out, overwrite)
    return sum(each.num_tokens for each in found)
