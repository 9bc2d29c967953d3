"""An executor that only remembers where tokens live: enough to test decisions."""

from __future__ import annotations

import numpy as np

from arborsim.controller import Controller
from arborsim.events import Event, TokenRun
from arborsim.measurements import Measurements
from arborsim.memory.moves import ALL_GROUPS, Moves
from arborsim.meters import MoveLog
from arborsim.policies.base import Policy
from arborsim.trace.episode import Episode
from arborsim.trace.play import play
from arborsim.tree import ThoughtTree


class PlainExecutor:
    """Tiers of one group, and their state after every iteration."""

    def __init__(self) -> None:
        self.tier = np.empty((1, 0), dtype=np.int8)

    def bind(self, tree: ThoughtTree) -> None:
        pass

    def prefill(self, run: TokenRun) -> None:
        self._append(run.num_tokens)

    def advance(self, run: TokenRun, moves: Moves, decided_from: int | None) -> None:
        self._append(run.num_tokens)
        assert (moves.group == ALL_GROUPS).all()
        self.tier[0, moves.token] = moves.target

    def activate(self, leaves: tuple[int, ...]) -> None:
        pass

    def apply(self, moves: Moves, examined_tokens: int) -> None:
        self.tier[0, moves.token] = moves.target

    def finish(self) -> None:
        pass

    def clock(self) -> float:
        return 0.0

    def measurements(self) -> Measurements:
        return Measurements()

    def _append(self, count: int) -> None:
        self.tier = np.concatenate([self.tier, np.zeros((1, count), dtype=np.int8)], axis=1)


def decide_all(
    policy: Policy, episode: Episode, budget_tokens: int, max_steps: int | None = None
) -> tuple[list[list[int]], np.ndarray]:
    """Play `episode` to `policy`.

    Returns
    -------
    tiers : list of list of int
        Tier of every token after each event, in order (runs count as one event).
    moves : int64 ``[moves, 4]``
        See `MoveLog.rows`.
    """
    log = MoveLog()
    executor = PlainExecutor()
    controller = Controller(
        policy,
        executor,
        budget_tokens=budget_tokens,
        layers=episode.info.geometry.layers,
        vocabulary=episode.info.geometry.vocab,
        meters=[log],
    )
    tiers = []
    event: Event
    for event in play(episode, max_steps=max_steps):
        controller.handle(event)
        tiers.append(executor.tier[0].tolist())
    return tiers, log.rows
