"""Blocks that say which tokens HBM holds: one pool over a stream, or numbers for each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.core.errors import BudgetInfeasible
from arborsim.core.events import Event
from arborsim.core.settings import setting
from arborsim.core.tiers import Tier
from arborsim.policies.arbor_blocks import given_up, tokens_that_leave
from arborsim.policies.base import CacheView, Protection
from arborsim.policies.blocks import lowest
from arborsim.policies.stream import ADAPTATIONS, off_path_blocks
from arborsim.policies.tree_rule import Blocks, Room, TreeRule
from arborsim.signals.attention import CumulativeAttention
from arborsim.signals.scores import Score


@dataclass(frozen=True)
class Situation:
    """What an allocation decides on.

    Attributes
    ----------
    who : str
        Name of the policy, for errors.
    view : CacheView
    event : Event
    score : float64 ``[tokens]``
    protected : bool ``[tokens]``
        Tokens that never move down.
    reachable : bool ``[tokens]``
        Tokens in HBM, and those that may be brought back now.
    room : Room
    keep_prompt, recover : bool
        Whether the prompt is protected whole, and whether anything is ever brought back.
    """

    who: str
    view: CacheView
    event: Event
    score: np.ndarray
    protected: np.ndarray
    reachable: np.ndarray
    room: Room
    keep_prompt: bool
    recover: bool

    @property
    def in_hbm(self) -> np.ndarray:
        """Bool ``[tokens]``: in HBM before the decision."""
        return np.asarray(self.view.tier[0] <= Tier.HBM_QUANTISED)


@dataclass(frozen=True)
class Pool:
    """One pool: the highest-scored tokens of the stream stay, wherever in the tree they are.

    On a tree, whole blocks off the active paths leave first, least recently active first.
    """

    adaptation: str = setting(
        "path", "what the stream is on a tree: the active paths, or everything",
        choices=ADAPTATIONS,
    )  # fmt: skip

    about: ClassVar[str] = "one pool over the stream"

    def scores(self) -> dict[str, Score]:
        """Scores needed besides the tokens' own."""
        return {}

    def protected(self, view: CacheView, protection: Protection) -> np.ndarray:
        """Bool ``[tokens]``: what never moves down."""
        if self.adaptation == "path":
            return protection.mask(view)
        mask = np.zeros(view.num_tokens, dtype=bool)
        mask[: protection.head(view.prompt_tokens)] = True
        mask[max(0, view.num_tokens - protection.recent) :] = True
        return mask

    def holds(self, at: Situation) -> np.ndarray:
        """Bool ``[tokens]``: what HBM holds after the decision."""
        view, room = at.view, at.room
        flat = self.adaptation == "flat"
        stream = at.reachable if flat else at.reachable & _on_path(view)
        pinned = int(np.count_nonzero(stream & at.protected))
        candidates = np.flatnonzero(stream & ~at.protected)
        if pinned > room.budget:
            raise BudgetInfeasible(
                at.who, pinned, room.budget,
                f"protected {pinned} on {len(view.leaves)} active path(s)",
            )  # fmt: skip
        blocks = [] if flat else off_path_blocks(view)
        elsewhere = sum(len(block) for block in blocks)
        total = pinned + len(candidates) + elsewhere
        goal = room.goal if total > room.limit else total
        while blocks and pinned + len(candidates) + elsewhere > goal:
            elsewhere -= len(blocks.pop(0))
        stay = max(0, goal - pinned - elsewhere)
        held = np.array(stream)
        held[candidates[lowest(at.score.take(candidates), len(candidates) - stay)]] = False
        for block in blocks:
            held[block] = True
        return held


def _on_path(view: CacheView) -> np.ndarray:
    """Bool ``[tokens]``: on an active path."""
    path = view.path
    mask = np.ones(view.num_tokens, dtype=bool)
    if len(path) < view.num_tokens:
        mask[:] = False
        mask[path] = True
    return mask


@dataclass(frozen=True)
class Tree(TreeRule):
    """ArborKV's numbers per block (TAE); inside a block the tail and the highest-scored stay."""

    about: ClassVar[str] = "per block of the tree, by value and distance (ArborKV's TAE)"

    def scores(self) -> dict[str, Score]:
        if not self.reads_attention:
            return {}
        return {"block-attention": CumulativeAttention(from_later_blocks=True)}

    def protected(self, view: CacheView, protection: Protection) -> np.ndarray:
        mask = protection.mask(view)
        nodes = np.array(view.leaves)
        if self.path_floor == 1:
            nodes = np.flatnonzero(view.tree.on_path(view.leaves))
        for node in nodes.tolist():
            if node != 0:  # of the prompt, what `protect` says
                mask[view.tree.tokens(node)] = True
        return mask

    def holds(self, at: Situation) -> np.ndarray:
        tree, held = at.view.tree, at.in_hbm
        blocks = self._blocks(at, held)
        keep = self.numbers(
            at.who, at.view, at.event, blocks, at.room,
            attention=at.view.scores["block-attention"][0] if self.reads_attention else None,
            recover=at.recover,
        )  # fmt: skip
        held = held.copy()
        for node in np.flatnonzero(keep > blocks.held).tolist():
            held[tree.tokens(node)] = at.reachable[tree.tokens(node)]
        shrunk = np.flatnonzero(keep < blocks.held)
        leaving = tokens_that_leave(
            at.view, shrunk, keep[shrunk], at.score, at.protected, self.tail
        )
        held[leaving] = False
        return held

    def _blocks(self, at: Situation, held: np.ndarray) -> Blocks:
        tree, count = at.view.tree, len(at.view.tree)
        owner = tree.node_of_token.values
        fixed = np.zeros(count, dtype=bool)
        fixed[list(at.view.leaves)] = True
        fixed[0] |= at.keep_prompt
        on_path = tree.on_path(at.view.leaves)
        return Blocks(
            sizes=tree.sizes,
            held=np.bincount(owner[held], minlength=count),
            reachable=np.bincount(owner[at.reachable], minlength=count),
            pinned=np.bincount(owner[at.protected], minlength=count),
            pruned=given_up(at.view, on_path),
            fixed=fixed,
            on_path=on_path,
        )


ALLOCATIONS: dict[str, type[Pool | Tree]] = {"pool": Pool, "tree": Tree}
