"""An executor that only remembers where tokens live: enough to test decisions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from arborsim.core.events import Decode, Event, TokenRun
from arborsim.core.measurements import Measurements
from arborsim.core.tree import ThoughtTree
from arborsim.machine.machine import num_groups
from arborsim.memory.moves import ALL_GROUPS, Moves
from arborsim.play.controller import Controller
from arborsim.play.episode import with_offline_optimum
from arborsim.play.move_log import MoveLog
from arborsim.policies.base import Policy
from arborsim.trace.episode import Episode, play


class PlainExecutor:
    """Tiers of every token, and nothing else."""

    def __init__(self, groups: int = 1) -> None:
        self.tier = np.empty((groups, 0), dtype=np.int8)
        self.reads: np.ndarray | None = None  # as last planned

    def bind(self, tree: ThoughtTree) -> None:
        pass

    def prefill(self, run: TokenRun) -> None:
        self._append(run.num_tokens)

    def advance(self, run: TokenRun, moves: Moves) -> None:
        self._append(run.num_tokens)
        self._move(moves)

    def activate(self, leaves: tuple[int, ...]) -> None:
        pass

    def apply(self, moves: Moves, examined_tokens: int, reads: np.ndarray | None = None) -> None:
        self._move(moves)
        self.reads = reads

    def finish(self) -> None:
        pass

    def clock(self) -> float:
        return 0.0

    def measurements(self) -> Measurements:
        return Measurements()

    def _append(self, count: int) -> None:
        fresh = np.zeros((len(self.tier), count), dtype=np.int8)
        self.tier = np.concatenate([self.tier, fresh], axis=1)

    def _move(self, moves: Moves) -> None:
        for group, token, target in zip(moves.group, moves.token, moves.target, strict=True):
            self.tier[slice(None) if group == ALL_GROUPS else group, token] = target


def in_steps(events: Iterable[Event], most: int = 1) -> Iterator[Event]:
    """The same events with runs of at most so many iterations."""
    for event in events:
        if isinstance(event, Decode):
            for step in range(0, event.run.steps, most):
                yield Decode(event.run.part(step, min(step + most, event.run.steps)))
        else:
            yield event


def decide_all(
    policy: Policy, episode: Episode, budget_tokens: int, max_steps: int | None = None
) -> tuple[list[list[int]], np.ndarray]:
    """Play `episode` to `policy`.

    Returns
    -------
    tiers : list of list of int
        Tier of every token after each event, in order (runs count as one event).  With several
        groups: the tiers of the first group, then those of the second, and so on.  Tokens that are
        not read have 16 added, as in `SlowWorld.run`.
    moves : int64 ``[moves, 4]``
        See `MoveLog.rows`.
    """
    log = MoveLog()
    executor = PlainExecutor(num_groups(policy, episode.info))
    controller = Controller(
        policy,
        executor,
        budget_tokens=budget_tokens,
        layers=episode.info.geometry.layers,
        vocabulary=episode.info.geometry.vocab,
        shape=episode.info.cache_shape,
        meters=[log],
    )
    tiers = []
    events: Iterable[Event] = play(with_offline_optimum(policy, episode, budget_tokens))
    for event in events if max_steps is None else in_steps(events, max_steps):
        controller.handle(event)
        seen = executor.tier.copy()
        if executor.reads is not None:
            seen[:, : executor.reads.shape[1]] += 16 * ~executor.reads
        tiers.append(seen.reshape(-1).tolist())
    return tiers, log.rows
