"""One recorded search, as columns in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from arborsim.core.observations import (
    AttentionRows,
    HeadRows,
    LayerRows,
    Observations,
    Signal,
)
from arborsim.trace.schema import TraceInfo


@dataclass(frozen=True)
class Episode:
    """One search: its event rows, and the signals of its tokens.

    Row arrays have shape ``[rows]``, token arrays ``[tokens]``; a *token* is a prefill or token
    row, numbered in row order.  Missing integers are -1, missing floats NaN.

    Attributes
    ----------
    index : int
        Episode number in the trace.
    info : TraceInfo
    kind : int8 ``[rows]``
        Values of `arborsim.trace.schema.Kind`.
    iteration, node, parent, depth : int32 ``[rows]``
    time_s : float64 ``[rows]``
    entropy, reward : float32 ``[rows]``
    correct : int8 ``[rows]``
        1, 0, or -1 for "not judged".  Of the last row: the search's answer; of boundary rows: the
        thought's own.
    end : int8 ``[rows]`` or None
        Values of `arborsim.trace.schema.End`; None if the trace does not tell which thoughts ended.
    token_rows : int64 ``[tokens]``
        Row of each token.
    token, position : int32 ``[tokens]``
    attention : AttentionRows or None
        One row per token; only if it was asked for when reading.
    per_layer : mapping of Signal to float16 ``[tokens, layers]``
        Only the signals that were asked for; the key sketch ``[tokens, sketch size]`` and the
        offline optimum's eviction times, float64 ``[tokens]``, are among them.
    text : tuple of (str or None) or None
        One per row, only if it was asked for.
    answer : tuple of (str or None) or None
        What finished thoughts answer; one per row, only if text was asked for.
    embedding_rows, embedding : int64 ``[k]``, float16 ``[k, size]``, or None
        The rows (boundaries) that have an embedding, and the embeddings; only if asked for.
    attention_layers : LayerRows or None
        Rows of single layers, float16 ``[layers, 2, position + 1]`` per token; only if asked for.
    head_attention : HeadRows or None
        Rows of single query heads of the captured layers; only if asked for.
    keys, values : float16 ``[tokens, captured layers, KV heads, head_dim]`` or None
    """

    index: int
    info: TraceInfo
    kind: np.ndarray
    iteration: np.ndarray
    node: np.ndarray
    parent: np.ndarray
    depth: np.ndarray
    time_s: np.ndarray
    entropy: np.ndarray
    reward: np.ndarray
    correct: np.ndarray
    token_rows: np.ndarray
    token: np.ndarray
    position: np.ndarray
    attention: AttentionRows | None
    per_layer: Mapping[Signal, np.ndarray]
    text: tuple[str | None, ...] | None = None
    embedding_rows: np.ndarray | None = None
    embedding: np.ndarray | None = None
    attention_layers: LayerRows | None = None
    head_attention: HeadRows | None = None
    keys: np.ndarray | None = None
    values: np.ndarray | None = None
    end: np.ndarray | None = None
    answer: tuple[str | None, ...] | None = None

    @property
    def num_rows(self) -> int:
        return len(self.kind)

    @property
    def num_tokens(self) -> int:
        return len(self.token_rows)

    def observations(self, start: int, stop: int) -> Observations:
        """What was observed for tokens ``start`` to ``stop``."""
        return Observations(
            self.num_tokens,
            self.attention,
            self.per_layer,
            self.attention_layers,
            self.head_attention,
            self.keys,
            self.values,
        ).slice(start, stop)
