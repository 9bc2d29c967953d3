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
    """

    index: int  # episode number in the trace
    info: TraceInfo
    kind: np.ndarray  # int8 [rows]: values of `arborsim.trace.schema.Kind`
    #: int32 [rows]
    iteration: np.ndarray
    node: np.ndarray
    parent: np.ndarray
    depth: np.ndarray
    time_s: np.ndarray  # float64 [rows]
    #: float32 [rows]
    entropy: np.ndarray
    reward: np.ndarray
    #: int8 [rows]: 1, 0, or -1 for "not judged".  Of the last row: the search's answer; of boundary
    #: rows: the thought's own.
    correct: np.ndarray
    token_rows: np.ndarray  # int64 [tokens]: row of each token
    #: int32 [tokens]
    token: np.ndarray
    position: np.ndarray
    attention: AttentionRows | None  # one row per token; only if it was asked for when reading
    #: mapping of Signal to float16 [tokens, layers]: only the signals that were asked for; the key
    #: sketch ``[tokens, sketch size]`` and the offline optimum's eviction times, float64
    #: ``[tokens]``, are among them
    per_layer: Mapping[Signal, np.ndarray]
    text: tuple[str | None, ...] | None = None  # one per row, only if it was asked for
    #: int64 [k], float16 [k, size]: the rows (boundaries) that have an embedding, and the
    #: embeddings; only if asked for
    embedding_rows: np.ndarray | None = None
    embedding: np.ndarray | None = None
    #: Rows of single layers, float16 ``[layers, 2, position + 1]`` per token; only if asked for
    attention_layers: LayerRows | None = None
    #: Rows of single query heads of the captured layers; only if asked for
    head_attention: HeadRows | None = None
    #: float16 [tokens, captured layers, KV heads, head_dim]
    keys: np.ndarray | None = None
    values: np.ndarray | None = None
    #: int8 [rows]: values of `arborsim.trace.schema.End`; None if the trace does not tell which
    #: thoughts ended
    end: np.ndarray | None = None
    #: What finished thoughts answer; one per row, only if text was asked for
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
