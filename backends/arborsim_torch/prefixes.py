"""A decoder that computes what several thoughts begin with only once.

Samples of a small model repeat each other word for word: of the tokens of a bank for wide searches
on the Game of 24, one in ten is new.  Leaves whose paths hold the same tokens so far share a token
in the cache, its logits and its hidden state; each still draws its next token by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from arborsim_torch.cache.forward import AttentionMetadata
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.context import PassContext
from arborsim_torch.decoder import PREFILL_BLOCK, Observed, Observer, TreeDecoder

_PLAIN_ONLY = "only a plain TreeDecoder observes attention, hidden states, keys and values"
MOST_LOGITS = 8192  #: largest vocabulary for which the logits of every token are kept


class PrefixDecoder:
    """Does what `TreeDecoder` does for leaves, over a cache of distinct paths.

    The observer gets the last hidden state of every leaf's token, computed or not; it cannot have
    attention or hidden states of layers.  It looks for the active leaves, in batch order, in
    `cache`, which is the decoder itself.  Nodes of the cache that it is given are single tokens, in
    order of their computation, of which there are `computed_tokens` after the prompt.
    """

    def __init__(
        self,
        model: Any,
        observer: Observer | None = None,
        prefill_block: int = PREFILL_BLOCK,
        cache: TieredCache | None = None,
    ) -> None:
        if observer is not None and (observer.wants_attention or observer.wants_hidden):
            raise ValueError(_PLAIN_ONLY)
        self.model, self.observer = model, observer
        self.cache: PrefixDecoder = self
        self.leaves: list[int] = []
        self.computed_tokens = 0
        self._inner = TreeDecoder(model, _Watcher(self), prefill_block, cache)
        self._at: dict[int, int] = {}  # leaf or complete node -> its last token's prefix
        self._next: dict[tuple[int, int], int] = {}  # (prefix, token) -> prefix
        self._logits = _GrowingRows()  # by prefix
        self._last = _GrowingRows()
        self._seen: list[tuple[PassContext, Tensor]] = []

    def prefill(
        self, token_ids: Sequence[int], on_block: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """See `TreeDecoder.prefill`."""
        self.leaves, self._at[0] = [0], 0
        logits = self._inner.prefill(token_ids, on_block)
        for state, last in self._seen:
            if self.observer is not None:
                self.observer.forward(self, state, [], last)
        self._logits.extend(logits[None])
        self._last.extend(self._seen[-1][1][:, -1])
        self._seen.clear()
        return logits

    def open(self, node: int, parent: int) -> None:
        """Add a node under a complete one."""
        self._at[node] = self._at[parent]

    def activate(self, leaves: Sequence[int]) -> None:
        """Turn to these leaves, in this batch order."""
        self.leaves = list(leaves)

    def length(self, seq: int) -> int:
        """Always 0: positions are not observed here."""
        return 0

    def readable(self, seq: int) -> None:
        """Nothing is evicted here."""

    def parent(self, node: int) -> int:
        """Refused, like `newest`: nodes share prefixes, so what a token follows is not a node's."""
        raise ValueError(_PLAIN_ONLY)

    def newest(self, count: int) -> Tensor:
        """Refused: a prefix's keys and values are stored for many leaves, not per leaf."""
        raise ValueError(_PLAIN_ONLY)

    def keys(self, layer: int, head: int) -> Tensor:
        """Refused, like `newest`."""
        raise ValueError(_PLAIN_ONLY)

    @property
    def kv_heads(self) -> int:
        """KV heads of the model."""
        return self._inner.cache.kv_heads

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Tensor:
        """Append one token to each active leaf; logits ``[leaves, vocabulary]``."""
        wanted = [(self._at[leaf], token) for leaf, token in zip(self.leaves, tokens, strict=True)]
        fresh = [key for key in dict.fromkeys(wanted) if key not in self._next]
        if fresh:
            self._compute(fresh)
        prefixes = [self._next[key] for key in wanted]
        self._at.update(zip(self.leaves, prefixes, strict=True))
        if self.observer is not None:
            state, _ = self._state
            self.observer.forward(self, state, [], self._last.take(prefixes)[:, None])
        return self._logits.take(prefixes)

    def _compute(self, fresh: list[tuple[int, int]]) -> None:
        first = len(self._inner.cache.tree)
        for number, (prefix, token) in enumerate(fresh, first):
            self._next[prefix, token] = number
            self._inner.open(number, prefix)
        self._inner.activate(range(first, first + len(fresh)))
        self._logits.extend(self._inner.step([token for _, token in fresh]))
        self._state = self._seen.pop()
        self._last.extend(self._state[1][:, 0])
        self.computed_tokens += len(fresh)

    def drop(self, node: int) -> None:
        """A node that no path will need again: its tokens may be those of others, and stay."""
        del self._at[node]

    def saw(self, state: PassContext, last: Tensor) -> None:
        """Note a pass of the inner decoder."""
        self._seen.append((state, last))


class _Watcher:
    """The inner decoder's observer: hands on the last hidden states."""

    wants_attention = wants_hidden = False

    def __init__(self, outer: PrefixDecoder) -> None:
        self._outer = outer

    def context(self, metadata: AttentionMetadata) -> PassContext:
        return PassContext(metadata)

    def forward(
        self, decoder: Observed, state: PassContext, hidden: list[Tensor], last: Tensor
    ) -> None:
        self._outer.saw(state, last)


class _GrowingRows:
    """Rows of a tensor that grows."""

    def __init__(self) -> None:
        self._data: Tensor | None = None
        self._count = 0

    def extend(self, rows: Tensor) -> None:
        end = self._count + len(rows)
        if self._data is None:
            self._data = rows.new_empty((max(64, end), *rows.shape[1:]))
        elif end > len(self._data):
            grown = rows.new_empty((max(2 * len(self._data), end), *rows.shape[1:]))
            grown[: self._count] = self._data[: self._count]
            self._data = grown
        self._data[self._count : end] = rows
        self._count = end

    def take(self, numbers: Sequence[int]) -> Tensor:
        assert self._data is not None
        return self._data[torch.tensor(numbers, device=self._data.device)]
