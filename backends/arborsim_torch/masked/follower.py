"""A search's controller on observations of a table, of any number of tokens at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from arborsim.core.errors import BudgetInfeasible, UsageError
from arborsim.core.events import Decode, Prefill, TokenRun
from arborsim.core.head_rows import ShiftedRows, attention_row, scaled
from arborsim.core.observations import DenseRows, HiddenRows, Observations, Signal
from arborsim.core.row_uses import ReducedRows, RowUse
from arborsim.core.shape import Rope
from arborsim.policies.base import Policy, row_uses
from arborsim.signals.scores import readers_table
from arborsim_torch.cache.layout import Layout
from arborsim_torch.live.setup import make_controller
from arborsim_torch.masked.executor import MaskedExecutor
from arborsim_torch.masked.observed import SERVED, Found, apart
from arborsim_torch.models import cache_shape, rope_of
from arborsim_torch.reference.tasks import Readers

#: The readers (`arborsim.core.observations.Signal.READERS`) of tokens after a number of others.
ReadersOf = Callable[[Sequence[int], int], Sequence[Readers]]
_PER_TOKEN = (
    *(Signal.HIDDEN_CHANGE, Signal.KEY_VARIANCE, Signal.VALUE_VARIANCE, Signal.KEY_NORM),
    *(Signal.VALUE_NORM, Signal.KEY_SKETCH, Signal.LAG_KEY, Signal.LAG_VALUE),
)


def check(policy: Policy) -> None:
    """A `UsageError` if masks cannot stand in for a cache under this policy."""
    lacking = sorted(policy.reads() - SERVED - {Signal.READERS, Signal.ROPE})
    found = [signal.value for signal in lacking]
    if policy.recovers:
        found.append("lost tokens recomputed")
    if found:
        raise UsageError(f"{policy.name} needs {found[0]}, which masked runs lack: run it live")


class Vectors:
    """Queries and keys of a chain's tokens; those of later tokens may be written again."""

    def __init__(self, rope: Rope | None, capacity: int) -> None:
        self.rope, self._capacity = rope, capacity
        self._queries = np.empty((0, 0, 0, 0), dtype=np.float16)  # [tokens, layers, heads, dim]
        self._keys = np.empty((0, 0, 0, 0), dtype=np.float32)  # [layers, KV heads, dim, tokens]

    @property
    def kv_heads(self) -> int:
        return int(self._keys.shape[1])

    def write(self, first: int, queries: np.ndarray, keys: np.ndarray) -> None:
        """Take in tokens, float16 ``[tokens, layers, heads or KV heads, head_dim]``."""
        if not len(self._queries):
            _, layers, kv_heads, dim = keys.shape
            self._queries = np.empty((self._capacity, *queries.shape[1:]), dtype=np.float16)
            self._keys = np.empty((layers, kv_heads, dim, self._capacity), dtype=np.float32)
        self._queries[first : first + len(queries)] = queries
        self._keys[..., first : first + len(keys)] = keys.transpose(1, 2, 3, 0)

    def query(self, i: int) -> np.ndarray:
        return scaled(self._queries[i])

    def row(self, i: int, readable: np.ndarray) -> np.ndarray:
        return attention_row(self.query(i), self._keys[..., : i + 1], readable)


class _HeadRows:
    """The `arborsim.core.head_rows.HeadRows` of a chain, of what its executor can read now."""

    def __init__(self, vectors: Vectors, executor: MaskedExecutor) -> None:
        self._vectors, self._executor = vectors, executor

    @property
    def kv_heads(self) -> int:
        return self._vectors.kv_heads

    @property
    def rope(self) -> Rope | None:
        return self._vectors.rope

    def query(self, i: int) -> np.ndarray:
        return self._vectors.query(i)

    def row(self, i: int) -> np.ndarray:
        return self._vectors.row(i, self._executor.readable(np.arange(i + 1)))


class Follower:
    """One search's controller, told of what a table observes.

    `infeasible` says why the policy cannot go on, empty while it can.
    """

    def __init__(
        self,
        model: Any,
        policy: Policy,
        budget_tokens: int,
        capacity: int,
        readers: ReadersOf | None = None,
    ) -> None:
        check(policy)
        self.executor = MaskedExecutor(Layout.of(model, policy.grouping), policy)
        self.controller = make_controller(
            policy, self.executor, budget_tokens, model, cache_shape(model), ()
        )
        self.needs, self.uses = policy.reads(), row_uses(policy)
        if Signal.READERS in self.needs and readers is None:
            raise UsageError(f"{policy.name} needs a task that knows what reads each token")
        self._readers = readers
        self._vectors = Vectors(rope_of(model), capacity)
        self._rows = _HeadRows(self._vectors, self.executor)
        self._apart = [use for use in self.uses if apart(use)]
        self.infeasible = ""

    def copy(self) -> Follower:
        """A follower that goes on from here, and leaves this one as it is.

        Vectors are shared: what later tokens have is written again.
        """
        shared = (self.controller.policy, self._vectors, self._readers)
        return copy.deepcopy(self, {id(each): each for each in shared})

    @property
    def known(self) -> int:
        """Tokens that the controller has been told of."""
        return self.controller.tree.num_tokens

    def prompt(self, tokens: Sequence[int], found: Found) -> None:
        self._tell(Prefill, tokens, found, ())

    def take(self, tokens: Sequence[int], found: Found, generated: Sequence[int] = ()) -> None:
        """Tokens that were decoded, the last of `generated`, with decisions where they are due.

        Rows that are reduced are reduced from one decision to the next, so policies that read such
        get a run at a time.
        """
        done = 0
        while done < len(tokens) and not self.infeasible:
            left = len(tokens) - done
            count = min(self.controller.due(), left) if self._apart else left
            span = slice(done, done + count)
            part = {name: each[span] for name, each in found.items()}
            self._tell(Decode, tokens[span], part, generated[: len(generated) - left + count])
            done += count

    def _tell(
        self,
        event: type[Prefill | Decode],
        tokens: Sequence[int],
        found: Found,
        generated: Sequence[int],
    ) -> None:
        observed = self._observed(len(tokens), found, generated)
        run = TokenRun((0,), len(tokens), np.asarray(tokens, dtype=np.int32), observed)
        try:
            self.controller.handle(event(run))
        except BudgetInfeasible as error:
            self.infeasible = str(error)

    def _observed(self, count: int, found: Found, generated: Sequence[int]) -> Observations:
        known = self.known
        per_layer = {each: found[each.value] for each in _PER_TOKEN if each.value in found}
        if self._readers is not None and Signal.READERS in self.needs:
            per_layer[Signal.READERS] = readers_table(self._readers(generated, known))
        attention = heads = hidden = None
        if "rows" in found:
            lengths = known + 1 + np.arange(count)
            offsets = np.concatenate([[0], lengths.cumsum()])
            attention = DenseRows(np.concatenate(found["rows"]), offsets)
        keys = found.get(Signal.KEYS.value)
        if Signal.HEAD_ATTENTION.value in found:
            assert keys is not None
            self._vectors.write(known, found[Signal.HEAD_ATTENTION.value], keys)
            heads = ShiftedRows(self._rows, known)
        if Signal.HIDDEN.value in found:
            states = found[Signal.HIDDEN.value]
            hidden = HiddenRows(tuple(range(states.shape[1])), states)
        values = found.get(Signal.VALUES.value)
        reduced = {use: self._reduced(use, found) for use in self._apart}
        return Observations(count, attention, per_layer, None, heads, keys, values, hidden, reduced)

    def _reduced(self, use: RowUse, found: Found) -> ReducedRows:
        """The rows of groups, of the queries that count."""
        if use in found:  # those of a prompt
            rows = found[use]
        elif use.generated:
            every = found["groups"]  # [tokens, groups, tokens]
            if use.keeps == "newest":
                rows = every[-1]
            else:
                rows = every[0] if len(every) == 1 else every.sum(0, dtype=np.float64)
            rows = rows[:, : self.known + len(every)]
        else:
            rows = np.empty((len(self.executor.tier), 0))
        if not rows.size:
            rows = np.empty((len(self.executor.tier), 0))
        return ReducedRows((rows.astype(np.float32),))
