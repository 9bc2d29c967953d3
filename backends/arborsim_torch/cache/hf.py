"""The transformers `Cache` over arborsim's: what models call, and nothing else.

Models only hand new keys and values to `update`.  What attention reads is asked of the pass itself
(`AttentionMetadata.view`), because a path's tokens are rarely one contiguous tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class Passes(Protocol):
    """A cache as its layers see it."""

    @property
    def seen_tokens(self) -> int:
        """Length of the longest active path, evicted tokens included."""
        ...

    @property
    def held_tokens(self) -> int:
        """Entries that the pass under way reads."""
        ...

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Take a layer's new keys and values."""
        ...


class TieredLayer(CacheLayerMixin):
    """One layer as transformers sees it."""

    def __init__(self, cache: Passes, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers annotates no __init__
        self._cache, self._index = cache, index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self._cache.store(self._index, key_states, value_states)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        held, seen = self._cache.held_tokens, self._cache.seen_tokens
        return held, max(0, seen + query_length - held)

    def get_seq_length(self) -> int:
        return self._cache.seen_tokens

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:  # its name before transformers 5.13
        return self.get_max_length()


class BatchedCaches:
    """Several caches as one: the rows of a batch are the sequences of each, one after the other."""

    def __init__(self, caches: Sequence[Passes], seqs: Sequence[int]) -> None:
        self._caches = caches
        self._seqs = seqs

    @property
    def seen_tokens(self) -> int:
        return max(cache.seen_tokens for cache in self._caches)

    @property
    def held_tokens(self) -> int:
        return max(cache.held_tokens for cache in self._caches)

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        first = 0
        for cache, seqs in zip(self._caches, self._seqs, strict=True):
            rows = slice(first, first + seqs)
            cache.store(layer, keys[rows], values[rows])
            first += seqs


def hf_cache(cache: Passes, layers: int) -> Cache:
    """A transformers `Cache` with `layers` layers."""
    return Cache(layers=[TieredLayer(cache, index) for index in range(layers)])
