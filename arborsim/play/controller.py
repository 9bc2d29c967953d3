"""The loop that every run shares: event -> signals -> policy -> plan -> executor.

The same controller drives a replay, where the executor accounts for bytes and seconds, and a live
model, where it moves real tensors.  `Controller.handle` is the whole story:

- tokens arrive in runs: the policy says how many iterations may pass before it wants to decide,
  or decides for the whole run at once,
- tree events update the tree, then the policy may decide,
- every decision is checked against the rules that no plan may break, then applied:

1. protected tokens never move down a tier,
2. what was destroyed stays destroyed, unless the plan recovers it by recomputing,
3. after a decision, HBM holds no more tokens than the budget, on average over the groups (checked
   by the controller for plans, by `check_run` for every iteration of a run).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from arborsim.core.errors import BudgetInfeasible, PlanError
from arborsim.core.events import (
    Answer,
    Boundary,
    Decode,
    Event,
    Prefill,
    Pressure,
    Prune,
    TokenRun,
    Transition,
)
from arborsim.core.measurements import Measurements
from arborsim.core.shape import UNKNOWN, CacheShape
from arborsim.core.tiers import Tier, by_tier, lowered
from arborsim.core.tree import ThoughtTree
from arborsim.memory.moves import ALL_GROUPS, Moves, Plan, in_whole_groups, kinds, resolve
from arborsim.policies.base import NEVER, CacheView, Policy
from arborsim.signals.scores import ScoreBook

_DDR, _EVICTED = int(Tier.DDR), int(Tier.EVICTED)
#: Of changes of tier: those by which tokens leave HBM, less those by which they return
_LEAVES_HBM = kinds(lambda a, b: a.in_hbm and not b.in_hbm) - kinds(
    lambda a, b: b.in_hbm and not a.in_hbm
)


class Executor(Protocol):
    """Where decisions become bytes and seconds: simulated, or a real model."""

    @property
    def tier(self) -> np.ndarray:
        """Int8 ``[groups, tokens]``: where each token lives (`Tier`)."""

    def bind(self, tree: ThoughtTree) -> None:
        """Follow the paths of `tree`, kept up to date by the controller.  Called once, first."""

    def prefill(self, run: TokenRun) -> None:
        """Compute the prompt, whose tokens enter HBM."""

    def advance(self, run: TokenRun, moves: Moves) -> None:
        """Decode the run, and after iteration ``t`` apply the moves of step ``t``.

        The policy decided after the iterations in which something moves.
        """

    def activate(self, leaves: tuple[int, ...]) -> None:
        """The next tokens belong to `leaves`."""

    def apply(self, moves: Moves, examined_tokens: int, reads: np.ndarray | None = None) -> None:
        """Carry out one decision taken over `examined_tokens` tokens.

        A move from `Tier.EVICTED` to a readable tier recomputes the token (rehydration).  `reads`
        is that of `Plan`: attention reads no other tokens until the next decision.
        """

    def finish(self) -> None:
        """The search is over: wait for what is still under way."""

    def clock(self) -> float:
        """Seconds since the search began."""

    def measurements(self) -> Measurements:
        """The figures measured so far."""


class Meter:
    """Watches decisions without taking part in them (quality figures, logs)."""

    def prefilled(self, run: TokenRun) -> None:
        """The prompt entered the cache."""

    def ran(self, run: TokenRun, tree: ThoughtTree, tier: np.ndarray, moves: Moves) -> None:
        """`run` was decoded with `moves` inside it.

        `tree` already holds the run's tokens.  `tier` is from before the run.
        """

    def moved(self, moves: Moves, tier: np.ndarray, reads: np.ndarray | None = None) -> None:
        """`moves` were applied outside a run.  `tier` is from before them.

        From now on `reads`, bool ``[groups, tokens]``, is read, and what is born later, or all.
        """


class Controller:
    """One search under one policy.

    HBM may hold `budget_tokens` after every decision.  `layers`, `vocabulary` and `shape` are those
    of the model whose signals are observed.
    """

    def __init__(
        self,
        policy: Policy,
        executor: Executor,
        *,
        budget_tokens: int,
        layers: int,
        vocabulary: int,
        shape: CacheShape = UNKNOWN,
        meters: Iterable[Meter] = (),
    ) -> None:
        self.policy = policy
        self.executor = executor
        self.tree = ThoughtTree()
        executor.bind(self.tree)
        self.budget_tokens = budget_tokens
        self.iterations = 0
        self._vocabulary, self._shape = vocabulary, shape
        self._scores = ScoreBook(policy.scores(), layers)
        self._meters = tuple(meters)
        self._leaves: tuple[int, ...] = (0,)
        self._slots: np.ndarray | None = None
        self._seen: tuple[CacheView, int] | None = None  # what `due` saw, and said
        self._prompt_tokens = 0
        self._margin = policy.pressure_margin(budget_tokens)
        formats = policy.formats
        self._scaled_jointly = by_tier(
            lambda t: formats[min(t.rung, len(formats)) - 1].scale_tokens if t.rung else 1
        )
        self._groups_tokens = bool((self._scaled_jointly > 1).any())

    def run(self, events: Iterable[Event]) -> None:
        """Handle all events of a search."""
        for event in events:
            self.handle(event)

    def handle(self, event: Event) -> None:
        """Bring tree, scores and cache up to date with `event`, and let the policy decide."""
        seen, self._seen = self._seen, None
        match event:
            case Decode(run):
                self._decode(run, seen)
            case Prefill(run):
                self._prefill(run)
            case Transition(leaves, opened):
                for node, parent in opened:
                    self.tree.open(node, parent)
                self.tree.activate(leaves)
                self._leaves = leaves
                self.executor.activate(leaves)
                self._decide(event)
            case Boundary(number, reward, entropy):
                block = self.tree.nodes[number]
                block.closed, block.reward, block.entropy = True, reward, entropy
                self._decide(event)
            case Prune(number):
                self.tree.nodes[number].pruned = True
                self._decide(event)
            case Answer():
                self.executor.finish()

    def due(self) -> int:
        """Decode iterations until the policy wants to decide, if no tree event comes before.

        A live search may hold that many back and hand them over as one run.
        """
        self._seen = self._look()
        return self._seen[1]

    def _look(self) -> tuple[CacheView, int]:
        view = self.view()
        return view, max(1, min(self.policy.next_decision(view), self._until_pressure(view)))

    def view(self) -> CacheView:
        """The view that the policy has now."""
        return self._view(self.executor.tier)

    def _view(self, tier: np.ndarray) -> CacheView:
        return CacheView(
            tier,
            self._scores.values(),
            self.tree,
            self._leaves,
            self._prompt_tokens,
            self.budget_tokens,
            self.iterations,
            self._vocabulary,
            self._shape,
            self._slots_now(),
        )

    def _slots_now(self) -> np.ndarray | None:
        """The slots of all tokens: new ones come last."""
        if self._slots is not None:
            groups, known = self._slots.shape
            fresh = np.arange(known, self.executor.tier.shape[1])
            if len(fresh):
                fresh = np.broadcast_to(fresh, (groups, len(fresh)))
                self._slots = np.concatenate([self._slots, fresh], axis=1)
        return self._slots

    def _prefill(self, run: TokenRun) -> None:
        self.tree.open(0, -1)
        self.tree.append(run.leaves, run.steps)
        self.tree.activate(run.leaves)
        self._prompt_tokens = run.num_tokens
        if self.policy.bounded:
            needed, made_of = self.policy.floor(self._prompt_tokens, self.budget_tokens)
            if needed > self.budget_tokens:
                raise BudgetInfeasible(self.policy.name, needed, self.budget_tokens, made_of)
        self._scores.begin(run, self.tree, generated=False)
        self._scores.skip(run.steps)
        self.executor.prefill(run)
        for meter in self._meters:
            meter.prefilled(run)
        self._decide(Prefill(run))

    def _decode(self, run: TokenRun, seen: tuple[CacheView, int] | None) -> None:
        """Decode `run`, stopping wherever the policy wants to decide.

        `seen` is what the policy sees before it, and when it is due, if that is known.
        """
        done = 0
        while done < run.steps:
            view, due = seen or self._look()
            seen = None
            if due == 1 and self.policy.plans_runs(view):
                self._decode_planned(run.part(done, run.steps) if done else run, view)
                return
            part = run.part(done, min(run.steps, done + due))
            self._enter(part)
            self._scores.skip(part.steps)
            self._execute(part, Moves.none())
            done += part.steps
            if part.steps == due:
                self._decide(Decode(part))

    def _decode_planned(self, run: TokenRun, before: CacheView) -> None:
        """Decode `run` with a decision after every iteration, all taken in one call."""
        self._enter(run)
        steps = self._scores.steps(run.steps)
        fresh = np.zeros((before.tier.shape[0], run.num_tokens), dtype=np.int8)
        view = self._view(np.concatenate([before.tier, fresh], axis=1))
        vars(view)["held"] = before.held + run.num_tokens  # not counted once more
        plan = self.policy.decide_run(view, run, steps)
        steps.skip(run.steps)  # what the policy left unobserved
        check_run(self.policy, view, run, plan)
        self._execute(run, plan)

    def _enter(self, run: TokenRun) -> None:
        """Let the tree know of `run`'s tokens, and the scores that they are about to come."""
        self.tree.append(run.leaves, run.steps)
        self._scores.begin(run, self.tree, True, self.executor.tier)
        self.iterations += run.steps

    def _execute(self, run: TokenRun, moves: Moves) -> None:
        for meter in self._meters:
            meter.ran(run, self.tree, self.executor.tier, moves)
        self.executor.advance(run, moves)

    def _until_pressure(self, view: CacheView) -> int:
        """Iterations until the cache is within the policy's margin of its budget."""
        if self._margin is None:
            return NEVER
        left = self.policy.headroom(view) - self._margin
        return max(1, -(-left // len(self._leaves)))

    def _decide(self, event: Event) -> None:
        """Ask the policy, then once more under `Pressure` if the budget is nearly used up."""
        left_alone = self._ask(event)
        if self._margin is not None and not isinstance(event, Prefill):
            left = self.policy.headroom(left_alone or self.view())
            if left <= self._margin:
                left_alone = self._ask(Pressure(self.budget_tokens - left, self.budget_tokens))
        if self.policy.bounded:
            used = (left_alone or self.view()).in_hbm
            if used > self.budget_tokens:
                raise BudgetInfeasible(
                    self.policy.name, used, self.budget_tokens, "what its last decision keeps"
                )

    def _ask(self, event: Event) -> CacheView | None:
        """Let the policy decide.  Returns what it saw if it leaves all as it is."""
        view = self.view()
        plan = self.policy.decide(view, event)
        if plan is None:
            return view
        check_plan(self.policy, view, plan)
        if plan.slots is not None:
            self._slots = plan.slots
        moves = Moves.between(view.tier, plan.tiers)
        if self._groups_tokens:
            moves = in_whole_groups(moves, self._scaled_jointly, self.tree, self._leaves)
        for meter in self._meters:
            meter.moved(moves, view.tier, plan.reads)
        self.executor.apply(moves, examined_tokens=view.num_tokens, reads=plan.reads)
        return None


def check_plan(policy: Policy, view: CacheView, plan: Plan) -> None:
    """Raise `PlanError` if `plan` breaks rule 1 or 2, or reads what it does not keep."""
    if plan.tiers.shape != view.tier.shape:
        raise PlanError(
            f"{policy.name} planned tiers of shape {plan.tiers.shape}, "
            f"the cache has {view.tier.shape}"
        )
    if plan.reads is not None:
        if plan.reads.shape != plan.tiers.shape:
            raise PlanError(
                f"{policy.name} planned reads of shape {plan.reads.shape}, "
                f"the cache has {view.tier.shape}"
            )
        lost = plan.reads & (plan.tiers == _EVICTED)
        if lost.any():
            raise PlanError(f"{policy.name} reads token {np.nonzero(lost)[1][0]}, which it evicts")
    if plan.slots is not None and plan.slots.shape != view.tier.shape:
        raise PlanError(f"{policy.name} planned slots of shape {plan.slots.shape}")
    down = lowered(plan.tiers, view.tier)
    if policy.bounded and down.any():
        broken = down & policy.protected(view)
        if broken.any():
            token = int(np.flatnonzero(broken.any(axis=0))[0])
            raise PlanError(f"{policy.name} moves protected token {token} down")
    if plan.recover:
        return
    back = (view.tier == _EVICTED) & (plan.tiers != _EVICTED)
    if back.any():
        token = int(np.nonzero(back)[1][0])
        raise PlanError(f"{policy.name} reads token {token}, which is evicted, without recover")


def check_run(policy: Policy, view: CacheView, run: TokenRun, plan: Moves) -> None:
    """Raise `PlanError` if `plan` breaks a rule in any iteration.

    `view` is the cache at the end of the run without the plan, of one leaf only.
    """
    if not len(plan.step) or (len(plan.step) == 1 and _evicts_one(policy, view, run, plan)):
        return
    steps, width = run.steps, len(run.leaves)
    born = view.num_tokens - run.num_tokens
    if (np.diff(plan.step) < 0).any() or plan.step[0] < 0 or plan.step[-1] >= steps:
        raise PlanError(f"{policy.name} planned moves outside the run's {steps} iterations")
    if (plan.token >= born + (plan.step + 1) * width).any():
        raise PlanError(f"{policy.name} moves a token before it exists")
    changes = resolve(plan, view.tier)  # an error where a group moves a token twice
    if (changes.source == Tier.EVICTED).any():
        raise PlanError(f"{policy.name} moves a token that is already evicted")

    path = view.tree.path(run.leaves[0])
    at = np.searchsorted(path, plan.token)  # ids rise along a path
    length = len(path) - steps + plan.step + 1
    protection = policy.protection(view.budget_tokens)
    on_path = path.take(at, mode="clip") == plan.token
    unsafe = (at < protection.head(view.prompt_tokens)) | (at >= length - protection.recent)
    if (on_path & unsafe).any():
        token = plan.token[on_path & unsafe][0]
        raise PlanError(f"{policy.name} moves protected token {token} down")

    removed = np.bincount(changes.step, _LEAVES_HBM[changes.kind], steps).astype(np.int64)
    groups = len(view.tier)
    start = int(view.held.sum()) - groups * run.num_tokens
    used = start + groups * width * np.arange(1, steps + 1) - np.cumsum(removed)
    over = used > groups * view.budget_tokens
    if over.any():
        mean = -(-int(used[np.argmax(over)]) // groups)
        raise PlanError(f"{policy.name} leaves {mean} tokens in HBM, budget {view.budget_tokens}")


def _evicts_one(policy: Policy, view: CacheView, run: TokenRun, plan: Moves) -> bool:
    """Whether a chain of one group decoded a token and rightly evicts one (False: look closer)."""
    tokens, token = view.num_tokens, int(plan.token[0])
    chain = run.num_tokens == len(view.tier) == 1 and len(view.tree.path(run.leaves[0])) == tokens
    if not chain or plan.step[0] or plan.group[0] != ALL_GROUPS or plan.target[0] != _EVICTED:
        return False
    protection = policy.protection(view.budget_tokens)
    if not protection.head(view.prompt_tokens) <= token < tokens - protection.recent:
        return False
    return view.tier[0, token] < _DDR and view.in_hbm - 1 <= view.budget_tokens
