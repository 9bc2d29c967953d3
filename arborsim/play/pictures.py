"""Pictures of a search, taken while it is played: its tree as a film, and a map of its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from arborsim.core.events import Answer, Boundary, Event, TokenRun, Transition
from arborsim.core.tiers import NUM_TIERS, in_two_memories
from arborsim.core.tree import ThoughtTree
from arborsim.memory.moves import Moves
from arborsim.play.controller import Controller, Meter
from arborsim.trace.episode import Episode
from arborsim.trace.schema import Kind

MAX_FRAMES = 40
MOST_CELLS = 400
#: What a cell holds besides the values of `Tier`.
NOT_BORN = NUM_TIERS


@dataclass(frozen=True)
class NodeRecord:
    """A thought block as it was at the end of the search."""

    parent: int  # an index; -1 for the root
    depth: int  # distance from the root
    tokens: int
    reward: float  # NaN if the search gave none
    pruned: bool
    closed: bool


@dataclass(frozen=True, eq=False)
class Frame:
    """A moment of the search."""

    time_s: float
    label: str  # what happened, e.g. ``"block 7 complete"``
    active: tuple[int, ...]  # leaves that decode next
    #: Integers [nodes, tiers]: columns in the order of `arborsim.core.tiers.Tier`; zero rows for
    #: nodes not opened yet
    tokens_by_tier: np.ndarray


@dataclass(frozen=True, eq=False)
class TreePicture:
    """One search as a film: its tree, and where the tree's KV lived at some moments."""

    policy: str
    budget: str
    trace: str
    episode: int
    nodes: tuple[NodeRecord, ...]
    frames: tuple[Frame, ...]


class TreeFilm:
    """Takes at most `MAX_FRAMES` frames, each at a `Transition`, `Boundary` or `Answer`.

    Of the `moments` at which it could, all in all, it takes those that lie evenly, the first and
    the last among them.  Tokens are counted by tier in the first cache group.
    """

    def __init__(self, moments: int) -> None:
        chosen = np.linspace(0, moments - 1, min(moments, MAX_FRAMES)).round().astype(int)
        self._chosen = frozenset(chosen.tolist())
        self._passed = 0
        self._frames: list[Frame] = []

    @classmethod
    def of(cls, episode: Episode) -> TreeFilm:
        """For a whole recorded search, whose transitions come in batches (`play`)."""
        kind = episode.kind
        turns = kind == Kind.TRANSITION
        first = turns & ~np.concatenate([[False], turns[:-1]])
        return cls(int((first | np.isin(kind, (Kind.BOUNDARY, Kind.ANSWER))).sum()))

    def watch(self, events: Iterable[Event], controller: Controller) -> Iterator[Event]:
        """Pass `events` on, and take a frame after each of those that are filmed."""
        for event in events:
            yield event
            match event:
                case Transition(turned, _):
                    more = " ..." if len(turned) > 4 else ""
                    label = f"turn to {', '.join(map(str, turned[:4]))}{more}"
                case Boundary(node, _, _):
                    label = f"block {node} complete"
                case Answer():
                    label = "answer"
                case _:
                    continue
            if self._passed in self._chosen:
                time_s, table = controller.executor.clock(), tokens_by_tier(controller)
                self._frames.append(Frame(time_s, label, controller.view().leaves, table))
            self._passed += 1

    def finish(self, tree: ThoughtTree) -> tuple[tuple[NodeRecord, ...], tuple[Frame, ...]]:
        """The blocks as they are now, and the frames, with all blocks in each."""
        frames = []
        for frame in self._frames:
            later = len(tree) - len(frame.tokens_by_tier)
            table = np.pad(frame.tokens_by_tier, ((0, later), (0, 0)))
            frames.append(replace(frame, tokens_by_tier=table))
        nodes = tuple(
            NodeRecord(n.parent, n.depth, tree.num_node_tokens(i), n.reward, n.pruned, n.closed)
            for i, n in enumerate(tree.nodes)
        )
        return nodes, tuple(frames)


def tokens_by_tier(controller: Controller) -> np.ndarray:
    """Where the tokens of each node are now in the first cache group, int64 ``[nodes, tiers]``."""
    tree, tier = controller.tree, in_two_memories(controller.executor.tier[0])
    cell = tree.node_of_token.values * NUM_TIERS + tier.astype(np.int64)
    return np.bincount(cell, minlength=len(tree) * NUM_TIERS).reshape(-1, NUM_TIERS)


@dataclass(frozen=True, eq=False)
class TokenMap:
    """A search under a policy, as a picture."""

    policy: str
    budget: str
    trace: str
    episode: int
    #: Int64 [columns]: first token of each; tokens are numbered in the order of their birth
    first_tokens: np.ndarray
    #: Int64 [rows]: the decode iteration after whose decisions a row was taken
    iterations: np.ndarray
    #: Uint8 [rows, columns]: the tier of most of a column's tokens, or `NOT_BORN`
    cells: np.ndarray


class TokenMapper(Meter):
    """A meter that takes the rows of a `TokenMap` while a search runs.

    `tokens` and `iterations` are those of the whole search.  With several cache groups a token
    counts as being where the median group has it.
    """

    def __init__(self, tokens: int, iterations: int) -> None:
        columns = min(tokens, MOST_CELLS)
        self._column = np.arange(tokens) * columns // tokens
        self.first_tokens = np.flatnonzero(np.diff(self._column, prepend=-1))
        rows = min(iterations, MOST_CELLS)
        self.iterations = np.linspace(1, iterations, rows).round().astype(np.int64)
        self._now = 0
        self._cells: list[np.ndarray] = []

    @classmethod
    def of(cls, episode: Episode) -> TokenMapper:
        """For a whole recorded search."""
        iterations = len(np.unique(episode.iteration[episode.kind == Kind.TOKEN]))
        return cls(episode.num_tokens, iterations)

    # What the last iteration decided is seen when the next one begins, or at the end.
    def ran(self, run: TokenRun, tree: ThoughtTree, tier: np.ndarray, moves: Moves) -> None:
        self._catch_up(tier)
        last = self._now + run.steps
        fresh = np.zeros((len(tier), run.num_tokens), dtype=tier.dtype)
        tier = np.concatenate([tier, fresh], axis=1)
        born, done = tier.shape[1] - run.num_tokens, 0
        while self._due < last:
            step = self._due - self._now  # iterations of this run that the row has seen
            moves.between_steps(done, step).carry_out(tier)
            self._take(tier[:, : born + step * len(run.leaves)])
            done = step
        self._now = last

    def finish(self, tier: np.ndarray) -> np.ndarray:
        """The cells, uint8 ``[rows, columns]``, given the tiers at the end of the search."""
        self._catch_up(tier)
        return np.array(self._cells).reshape(-1, len(self.first_tokens))

    @property
    def _due(self) -> int:
        """The iteration that the next row is of."""
        taken = len(self._cells)
        return int(self.iterations[taken]) if taken < len(self.iterations) else 1 << 60

    def _catch_up(self, tier: np.ndarray) -> None:
        while self._due <= self._now:
            self._take(tier)

    def _take(self, tier: np.ndarray) -> None:
        known = tier[0] if len(tier) == 1 else np.sort(tier, axis=0)[(len(tier) - 1) // 2]
        state = np.full(len(self._column), NOT_BORN, dtype=np.int64)
        state[: len(known)] = in_two_memories(known)
        kinds = NOT_BORN + 1
        counts = np.bincount(
            self._column * kinds + state, minlength=len(self.first_tokens) * kinds
        ).reshape(-1, kinds)
        self._cells.append(counts.argmax(axis=1).astype(np.uint8))


def packed_runs(cells: np.ndarray) -> np.ndarray:
    """Cells column by column as runs, uint16 ``[runs]``: 8 times the length, plus the cell.

    A token seldom changes its tier, so that a column is a handful of runs.
    """
    columns = np.ascontiguousarray(cells.T)
    starts = np.diff(columns, axis=1, prepend=np.uint8(255)) != 0
    starts[:, 0] = True
    first = np.flatnonzero(starts)
    lengths = np.diff(first, append=columns.size)
    return np.asarray(8 * lengths + columns.ravel()[first], dtype=np.uint16)
