"""From what happens in a live search to the events that controllers take.

The feed is the live twin of `arborsim.trace.episode.play`: it says the same things in the same
order, with the same numbers, as a recording of the search would when it is played.  Decode
iterations are held back until some controller wants to decide, so that a policy is asked no more
often than it needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from arborsim.core import events
from arborsim.core.head_rows import ShiftedRows, attention_row, keys_of, scaled
from arborsim.core.observations import Observations, Signal
from arborsim.core.row_uses import ReducedRows, RowUse
from arborsim.core.shape import Rope
from arborsim.core.tree import GrowingArray, ThoughtTree
from arborsim.signals.scores import readers_table
from arborsim_torch.capture import Capture
from arborsim_torch.captured import Captured
from arborsim_torch.decoder import TreeDecoder
from arborsim_torch.models import rope_of
from arborsim_torch.reference.tasks import Readers

#: Iterations that are held back at most; `arborsim_torch.capture` bounds what waits with them.
_MOST_HELD = 4096


class Driven(Protocol):
    """A controller as its feed sees it: `Controller`, or one in its place."""

    @property
    def tree(self) -> ThoughtTree: ...

    def handle(self, event: events.Event) -> None: ...

    def due(self) -> int: ...


class Feed:
    """A `Listener` that drives controllers, whose policies read the signals `needs`.

    The signals are of captured `layers`.  `capture` is that of the recorder, None if no policy
    needs a signal.  `readable` is that of `LiveHeadRows`, `on_begin` gets the decoder before
    anything is computed, and `clock` gives seconds.  `handling_s` have been spent on signals,
    decisions and what they caused, of which `signals_s` on the device and on the way to the host.
    """

    def __init__(
        self,
        controllers: Sequence[Driven],
        capture: Capture | None,
        needs: frozenset[Signal],
        layers: tuple[int, ...],
        readable: Readable | None = None,
        on_begin: Callable[[TreeDecoder], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.handling_s = self.signals_s = 0.0
        self._on_begin, self._clock = on_begin, clock
        self._controllers = controllers
        self._capture = capture
        self._needs = needs
        self._layers = layers
        self._readable = readable
        self._opened = 0
        self._leaves: tuple[int, ...] = ()
        self._tokens: list[int] = []
        self._due = 0
        self._readers: list[Readers] = []  # of the tokens that were held back

    def began(self, decoder: TreeDecoder) -> None:
        self._decoder = decoder
        rope = rope_of(decoder.model)
        self._heads = LiveHeadRows(decoder.cache.tree, rope, self._readable)
        if self._on_begin is not None:
            self._on_begin(decoder)

    @property
    def wants_readers(self) -> bool:
        return Signal.READERS in self._needs

    def prompt(self, tokens: Sequence[int], readers: Sequence[Readers] | None) -> None:
        begun = self._clock()
        self._opened = 1
        self._readers = list(readers or ())
        self._tell(events.Prefill(self._run((0,), list(tokens))))
        self.handling_s += self._clock() - begun

    def iteration(
        self, leaves: Sequence[int], tokens: Sequence[int], readers: Sequence[Readers] | None
    ) -> None:
        begun = self._clock()
        if self._leaves != tuple(leaves):
            self._flush()
            self._leaves = tuple(leaves)
        if not self._tokens:
            self._due = min(min(c.due() for c in self._controllers), _MOST_HELD)
        self._tokens += tokens
        self._readers += readers or ()
        if len(self._tokens) >= self._due * len(leaves):
            self._flush()
        self.handling_s += self._clock() - begun

    def turned(self, leaves: tuple[int, ...], parents: tuple[int, ...]) -> None:
        pairs = zip(leaves, parents, strict=True)
        opened = tuple((leaf, parent) for leaf, parent in pairs if leaf >= self._opened)
        self._opened = max(self._opened, max(leaves) + 1)
        self._event(events.Transition(leaves, opened))

    def closed(self, node: int, reward: float, entropy: float) -> None:
        # Recordings hold both in float32.
        self._event(events.Boundary(node, float(np.float32(reward)), float(np.float32(entropy))))

    def pruned(self, node: int) -> None:
        self._event(events.Prune(node))

    def answered(self, correct: bool | None) -> None:
        self._event(events.Answer(correct))

    def _event(self, event: events.Event) -> None:
        begun = self._clock()
        self._flush()
        self._tell(event)
        self.handling_s += self._clock() - begun

    def _flush(self) -> None:
        """Hand over the iterations that were held back."""
        if self._tokens:
            tokens, self._tokens = self._tokens, []
            self._tell(events.Decode(self._run(self._leaves, tokens)))

    def _tell(self, event: events.Event) -> None:
        for controller in self._controllers:
            controller.handle(event)

    def _run(self, leaves: tuple[int, ...], tokens: list[int]) -> events.TokenRun:
        token = np.asarray(tokens, dtype=np.int32)
        observed = self._observed(len(token), len(leaves))
        return events.TokenRun(leaves, len(token) // len(leaves), token, observed)

    def _observed(self, count: int, width: int) -> Observations:
        known: dict[Signal, np.ndarray] = {}
        if self.wants_readers:
            known[Signal.READERS], self._readers = readers_table(self._readers), []
        if self._capture is None:
            return Observations(count, per_layer=known)
        begun = self._clock()
        self._capture.drain(self._decoder)
        fresh = self._capture.take()
        self.signals_s += self._clock() - begun
        n = self._controllers[0].tree.num_tokens
        lengths = self._decoder.cache.position.values[n : n + count] + 1
        heads = keys = values = None
        sizes = {
            signal: flat.reshape(len(flat), len(self._layers), -1)
            for signal in (Signal.KEYS, Signal.VALUES)
            if (name := f"{signal.value} sizes") in fresh.columns
            for flat in (fresh.values(name),)
        }
        if "keys" in fresh.columns:
            keys = self._vectors(fresh.values("keys"))
        if "values" in fresh.columns:
            values = self._vectors(fresh.values("values"))
        if "queries" in fresh.columns and Signal.HEAD_ATTENTION in self._needs:
            heads = self._heads.append(self._vectors(fresh.values("queries")), keys, count)
        return Observations(
            count,
            fresh.attention(lengths) if Signal.ATTENTION in self._needs else None,
            {**fresh.per_layer(self._needs), **known},
            fresh.layer_attention(self._layers),
            heads,
            keys,
            values,
            fresh.hidden(self._capture.hidden_layers) if Signal.HIDDEN in self._needs else None,
            self._reduced(fresh, lengths[len(lengths) - width :].tolist()),
            sizes,
        )

    def _reduced(self, fresh: Captured, lengths: list[int]) -> dict[RowUse, ReducedRows]:
        """The run's rows, reduced, of leaves whose paths have these lengths."""
        assert self._capture is not None
        layout = self._decoder.cache.layout
        groups = {"shared": 1, "layer": layout.layers, "head": layout.layers * layout.kv_heads}
        found = {}
        for use in self._capture.reduces:
            rows = fresh.reduced.get(use)
            if rows is None:  # no query of the run counts
                leaves = [np.empty((groups[use.grouping], 0))] * len(lengths)
            else:
                leaves = [own[:, :n] for own, n in zip(rows, lengths, strict=True)]
            found[use] = ReducedRows(tuple(leaves))
        return found

    def _vectors(self, flat: np.ndarray) -> np.ndarray:
        """``[tokens, captured layers, heads or KV heads, head_dim]``."""
        return flat.reshape(len(flat), len(self._layers), -1, self._decoder.cache.layout.head_dim)


#: Of one group's tokens: which can be read now.  Int64 tokens -> bool ``[layers, kv_heads, n]``.
Readable = Callable[[np.ndarray], np.ndarray]


class LiveHeadRows:
    """Rows as `arborsim.core.head_rows.VectorRows` computes them from a trace, token by token.

    The tree holds the tokens whose vectors have been appended, whose queries and keys `rope`
    rotated. Tokens that are not `readable` now have no part in the softmax.
    """

    def __init__(
        self, tree: ThoughtTree, rope: Rope | None, readable: Readable | None = None
    ) -> None:
        self.rope = rope
        self._tree = tree
        self._readable = readable
        self._queries: GrowingArray | None = None  # float16 [tokens, layers, heads, head_dim]
        self._keys = np.empty((0, 0, 0, 0), dtype=np.float32)  # [layers, KV heads, dim, tokens]
        self._known = GrowingArray(np.bool_)  # by token, whether its query was taken

    @property
    def kv_heads(self) -> int:
        return int(self._keys.shape[1])

    def append(
        self, queries: np.ndarray, keys: np.ndarray | None, count: int | None = None
    ) -> ShiftedRows:
        """Take in tokens; both float16 ``[tokens, layers, heads or KV heads, head_dim]``.

        Without keys there are queries, but no rows.  Of `count` tokens maybe the last ones only.
        """
        count = len(queries) if count is None else count
        if self._queries is None:
            self._queries = GrowingArray(np.float16, row=queries.shape[1:])
        start, end = len(self._known), len(self._known) + count
        self._known.extend(np.arange(count) >= count - len(queries))
        missing = (count - len(queries), *queries.shape[1:])
        self._queries.extend(np.full(missing, np.nan, dtype=np.float16))
        self._queries.extend(queries)
        if keys is None:
            return ShiftedRows(self, start)
        new = keys.transpose(1, 2, 3, 0)
        if end > self._keys.shape[3]:
            grown = np.zeros((*new.shape[:3], max(end, 2 * start, 256)), dtype=np.float32)
            if start:
                grown[..., :start] = self._keys[..., :start]
            self._keys = grown
        self._keys[..., start:end] = new
        return ShiftedRows(self, start)

    def query(self, i: int) -> np.ndarray:
        """Token `i`'s scaled query, float32 ``[layers, heads, head_dim]``; NaN: not taken."""
        assert self._queries is not None
        return scaled(self._queries.values[i])

    def row(self, i: int) -> np.ndarray:
        """Float32 ``[layers, heads, position + 1]`` of token `i`."""
        assert self._known.values[i], "the query was not taken"
        path = self._tree.path(int(self._tree.node_of_token.values[i]))
        path = path[: int(np.searchsorted(path, i)) + 1]
        readable = None if self._readable is None else self._readable(path)
        return attention_row(self.query(i), keys_of(self._keys, path), readable)
