"""Arms of `benchmarks/quality.py` on many searches at once: policies decide, a mask removes.

The policies, their scores and the controller are those of live runs.  Caches are not: the keys and
values of all searches lie in one table, from which nothing is taken away; what a policy destroys is
masked, what it quantises is rounded to the format and back.  So one forward pass serves all
searches, in a fraction of the time of live runs with their paged pools, and answers the same
(`tests/validate/test_quality_masked.py`).  Bytes and seconds are live runs' to measure.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from arborsim.core.errors import BudgetInfeasible, UsageError
from arborsim.core.events import Decode, Prefill, TokenRun
from arborsim.core.measurements import Measurements
from arborsim.core.observations import DenseRows, Observations, Signal
from arborsim.core.row_uses import ReducedRows, RowUse
from arborsim.core.tiers import MOST_TIERS, Tier, by_tier
from arborsim.core.tree import GrowingTable, ThoughtTree
from arborsim.memory.moves import Changes, Moves, kinds, resolve
from arborsim.play.backends import LiveResult
from arborsim.play.episode import Cell
from arborsim.policies.base import Policy, hints_of, row_uses
from arborsim.signals.scores import readers_table
from arborsim_torch.live.feed import LiveHeadRows
from arborsim_torch.live.setup import make_controller
from arborsim_torch.models import cache_shape, rope_of
from arborsim_torch.reference import Problem, Task
from arborsim_torch.tiers.codec import codec_of
from benchmarks.claims.masked import greedy
from benchmarks.masked_batch import SERVED, Searches

_EVICTED = kinds(lambda a, b: b is Tier.EVICTED)
_QUANTISED = kinds(lambda a, b: b.rung > a.rung)
_OFFLOADED = kinds(lambda a, b: b.offloaded and not a.offloaded)
_COMPACTED = 32  # steps from one look for free slots to the next
_RUNG = by_tier(lambda tier: tier.rung)


class _Executor:
    """`arborsim.play.controller.Executor` on one row of a batch."""

    def __init__(self, searches: Searches, row: int, policy: Policy) -> None:
        config = searches.model.config
        self.searches, self.row = searches, row
        layers, _, heads, _ = searches.unread.shape
        self._tier = GrowingTable(layers * heads, np.int8)
        self._codecs = [codec_of(each, config.head_dim) for each in policy.formats]
        self._held = np.zeros(MOST_TIERS, dtype=np.int64)  # of the cells of all groups, by tier
        cell = config.num_hidden_layers * config.num_key_value_heads // (layers * heads)
        plain = 2 * config.head_dim * searches.keys[0].element_size()
        sizes = [plain, *(codec.bytes_per_token(config.head_dim) for codec in self._codecs)]
        self._bytes = by_tier(
            lambda t: 0 if t is Tier.EVICTED else cell * sizes[min(t.rung, len(self._codecs))]
        )
        self._measured = Measurements()

    @property
    def tier(self) -> np.ndarray:
        return self._tier.values

    def bind(self, tree: ThoughtTree) -> None: ...
    def activate(self, leaves: tuple[int, ...]) -> None: ...
    def finish(self) -> None: ...

    def clock(self) -> float:
        return time.perf_counter()

    def measurements(self) -> Measurements:
        return self._measured

    def prefill(self, run: TokenRun) -> None:
        self._measured.prompt_tokens = run.num_tokens
        self.arrive(run.num_tokens)

    def advance(self, run: TokenRun, moves: Moves) -> None:
        self._measured.generated_tokens += run.num_tokens
        assert not len(moves) or int(moves.step[0]) == run.steps - 1, "moves in the past"
        self.arrive(run.num_tokens)
        self._carry_out(moves)

    def apply(self, moves: Moves, examined_tokens: int, reads: np.ndarray | None = None) -> None:
        if reads is not None:
            raise UsageError("masked searches read all that is kept: run this policy live")
        self._carry_out(moves)

    def arrive(self, tokens: int) -> None:
        """New tokens are in HBM."""
        self._tier.extend(tokens, Tier.HBM)
        self._held[Tier.HBM] += tokens * len(self.tier)
        self._look()

    def _look(self) -> None:
        m, held = self._measured, self._held
        m.peak_hbm_kv_tokens = max(
            m.peak_hbm_kv_tokens, -(-int(held[: Tier.DDR].sum()) // len(self.tier))
        )
        sizes = held * self._bytes
        m.peak_hbm_kv_bytes = max(m.peak_hbm_kv_bytes, int(sizes[: Tier.DDR].sum()))
        m.peak_ddr_bytes = max(m.peak_ddr_bytes, int(sizes[Tier.DDR : Tier.EVICTED].sum()))

    def _carry_out(self, moves: Moves) -> None:
        changes = resolve(moves, self.tier)
        if not len(changes):
            return
        if (changes.source == Tier.EVICTED).any():
            raise UsageError("masked searches recompute nothing: run this policy live")
        m, groups = self._measured, len(self.tier)
        m.evicted_tokens += changes.count(_EVICTED) / groups
        m.quantised_tokens += changes.count(_QUANTISED) / groups
        m.offloaded_tokens += changes.count(_OFFLOADED) / groups
        flow = changes.flow.reshape(MOST_TIERS, MOST_TIERS)
        self._held += flow.sum(0) - flow.sum(1)
        moves.carry_out(self.tier)
        lost = changes.of(_EVICTED)
        heads = self.searches.unread.shape[2]
        if len(lost):
            layer, head = np.divmod(lost.group, heads)
            slot = self.searches.slot[self.row, lost.token]
            self.searches.unread[layer, self.row, head, slot] = True
        self._round(changes.of(_QUANTISED))
        self._look()

    def readable(self, tokens: np.ndarray) -> np.ndarray:
        """Bool ``[layers, KV heads, n]``."""
        config, unread = self.searches.model.config, self.searches.unread[:, self.row]
        shape = (config.num_hidden_layers, config.num_key_value_heads, len(tokens))
        slot = self.searches.slot[self.row, tokens]
        return np.broadcast_to(~unread.numpy()[:, :, slot] & (slot >= 0), shape)

    def _round(self, changes: Changes) -> None:
        """Store vectors in their formats, and read them again."""
        if not len(changes):
            return
        searches, heads = self.searches, self.searches.unread.shape[2]
        shared, rung = len(searches.unread) == 1, _RUNG[changes.target]
        for layer, both in enumerate(zip(searches.keys, searches.values, strict=True)):
            here = np.ones(len(rung), bool) if shared else changes.group // heads == layer
            for kind in np.unique(rung[here]):
                codec = self._codecs[min(kind, len(self._codecs)) - 1]
                for head in range(both[0].shape[1]):
                    mine = here & (rung == kind)
                    mine &= (heads == 1) | (changes.group % heads == head)
                    slot = torch.from_numpy(searches.slot[self.row, changes.token[mine]])
                    for cache in both:
                        data, scale = codec.encode(cache[self.row, head, slot])
                        cache[self.row, head, slot] = codec.decode(data, scale, cache.dtype)


class _Search:
    """One search's controller, and what it has not been told yet."""

    def __init__(
        self, searches: Searches, row: int, task: Task, problem: Problem, policy: Policy,
        budget_tokens: int,
    ) -> None:  # fmt: skip
        self.executor = _Executor(searches, row, policy)
        model = searches.model
        self.controller = make_controller(
            policy, self.executor, budget_tokens, model, cache_shape(model), ()
        )
        self._needs, self._uses = policy.reads(), row_uses(policy)
        self._task, self._problem = task, problem
        self._heads = LiveHeadRows(self.controller.tree, rope_of(model), self.executor.readable)
        self._asks_generated = any(
            use.generated for use in self._uses if use.keeps in ("rows", "queries", "sparsity")
        )
        self._tokens: list[int] = []
        self._found: list[dict[str, np.ndarray]] = []
        self._due = 0
        self.infeasible = ""

    def prompt(self, found: dict[str, np.ndarray]) -> None:
        tokens = self._problem.prompt
        self._tokens, self._found = list(tokens), [found]
        self._tell(Prefill, ())

    def token(self, generated: Sequence[int], found: dict[str, np.ndarray]) -> None:
        if self.infeasible:
            return
        if not self._tokens:
            self._due = self.controller.due()
        self._tokens.append(generated[-1])
        self._found.append(found)
        if len(self._tokens) >= self._due:
            self._tell(Decode, generated)

    def finish(self) -> None:
        """The search is over; tokens that no decision has seen yet are in HBM, too."""
        self.executor.arrive(len(self._tokens))

    def _tell(self, event: type[Prefill | Decode], generated: Sequence[int]) -> None:
        count = len(self._tokens)
        observed = self._observed(count, generated)
        run = TokenRun((0,), count, np.asarray(self._tokens, dtype=np.int32), observed)
        self._tokens, self._found = [], []
        try:
            self.controller.handle(event(run))
        except BudgetInfeasible as error:
            self.infeasible = str(error)

    def _observed(self, count: int, generated: Sequence[int]) -> Observations:
        found, known = self._found, self.controller.tree.num_tokens
        per_layer = {
            signal: np.concatenate([each[signal.value] for each in found])
            for signal in (Signal.HIDDEN_CHANGE, Signal.KEY_VARIANCE, Signal.VALUE_VARIANCE)
            if signal.value in found[0]
        }
        if Signal.READERS in self._needs:
            readers = self._task.readers(self._problem, generated, known)
            per_layer[Signal.READERS] = readers_table(readers)
        attention = heads = keys = None
        if "rows" in found[0]:
            parts = [row for each in found for row in each["rows"]]
            lengths = known + 1 + np.arange(count)
            parts = [row[:n] for row, n in zip(parts, lengths, strict=True)]
            attention = DenseRows(np.concatenate(parts), np.concatenate([[0], lengths.cumsum()]))
        if "keys" in found[0]:
            keys = np.concatenate([each["keys"] for each in found])
        if Signal.HEAD_ATTENTION in self._needs and (self._asks_generated or not known):
            queries = np.concatenate([each["queries"] for each in found])
            heads = self._heads.append(queries, keys)
        reduced = {use: self._reduced(use, known) for use in self._uses if _apart(use)}
        return Observations(count, attention, per_layer, None, heads, keys, None, None, reduced)

    def _reduced(self, use: RowUse, known: int) -> ReducedRows:
        """The rows of groups, of the queries that count."""
        rows = [each["groups"] for each in self._found]  # [layers, KV heads, count, tokens]
        if not known:
            rows = [rows[0][:, :, use.first(rows[0].shape[2]) :]]
        elif not use.generated:
            rows = []
        if use.grouping == "layer":
            rows = [each.mean(1, keepdims=True) for each in rows]
        flat = [each.reshape(-1, *each.shape[2:]) for each in rows if each.shape[2]]
        if not flat:
            return ReducedRows((np.empty((self.executor.tier.shape[0], 0)),))
        if use.keeps == "newest":
            return ReducedRows((flat[-1][:, -1],))
        total = np.zeros((len(flat[0]), flat[-1].shape[2]))
        for each in flat:
            total[:, : each.shape[2]] += each.sum(1, dtype=np.float64)
        return ReducedRows((total.astype(np.float32),))


def _apart(use: RowUse) -> bool:
    """Whether a use is of reduced rows of groups.

    Those of the model are handed over whole; those of query heads are made again of their queries.
    """
    return use.reduced and use.grouping != "shared" and not use.of_heads


def check(policy: Policy) -> None:
    """A `UsageError` if masks cannot stand in for a cache under this policy."""
    found = [signal.value for signal in sorted(policy.reads() - SERVED)]
    found += [
        f"rows reduced to '{use.keeps}'" for use in row_uses(policy)
        if _apart(use) and use.keeps not in ("sum", "newest")
    ]  # fmt: skip
    if hints_of(policy).bounds_page:
        found.append("steps that read some pages alone")
    if any(each.together > 1 for each in policy.formats):
        found.append("keys quantised in groups of tokens")
    if found:
        raise UsageError(f"{policy.name} needs {found[0]}, which masked searches lack: run it live")


@torch.no_grad()
def search(
    model: Any, task: Task, problems: Sequence[Problem], cell: Cell, full_tokens: Sequence[int],
    give_up: bool = False,
) -> Iterator[LiveResult]:  # fmt: skip
    """Search greedily under a policy; prompts must be of one length.

    A budget that is a share is one of `full_tokens`, what a search takes with everything kept; of
    `full`, which needs none, 0.  With `give_up` searches end that can no longer succeed, and no
    steps are counted.
    """
    policy, begun = cell.policy, time.perf_counter()
    check(policy)
    prompts = torch.tensor([each.prompt for each in problems])
    searches = Searches(model, prompts, prompts.shape[1] + task.max_tokens, policy)
    budgets = [cell.budget.in_tokens(each) for each in full_tokens]
    each = [
        _Search(searches, row, task, problem, policy, budget)
        for row, (problem, budget) in enumerate(zip(problems, budgets, strict=True))
    ]
    for one, found in zip(each, searches.observed(prompts.shape[1]), strict=True):
        one.prompt(found)
    tokens: list[list[int]] = [[] for _ in problems]
    for step, _, rows in greedy(searches, task, problems, tokens, give_up):
        observed = searches.observed(1)
        for row, (i, found) in enumerate(zip(rows, observed, strict=True)):
            each[i].executor.row = row
            each[i].token(tokens[i], found)
        if step % _COMPACTED == 0:
            searches.compact()
    wall_s = (time.perf_counter() - begun) / len(problems)
    for problem, own, one, full, budget in zip(
        problems, tokens, each, full_tokens, budgets, strict=True
    ):
        one.finish()
        verdict, good = task.judge(problem, own), not one.infeasible
        steps = task.steps(problem, own) if good and not give_up else (None, None)
        yield LiveResult(
            problem.index, policy.name, cell.budget.text, budget,
            (verdict.finished and verdict.correct) if good else None, len(own),
            full or len(problem.prompt) + len(own), wall_s,
            one.executor.measurements(), infeasible=one.infeasible,
            steps_right=steps[0] if good else None, steps=steps[1] if good else None,
        )  # fmt: skip
