"""A live decoder for a tree of thoughts: one forward pass per iteration for all active leaves.

>>> decoder = TreeDecoder(model)
>>> logits = decoder.prefill(prompt_ids)          # node 0
>>> decoder.open(1, parent=0); decoder.open(2, parent=0)
>>> decoder.activate([1, 2])
>>> logits = decoder.step([token_1, token_2])     # [2, vocabulary]

The logits equal those of a plain forward pass over the path's tokens, to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from arborsim_torch import attention
from arborsim_torch.attention import BatchState
from arborsim_torch.cache.layout import Layout
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.cache.views import Reading

PREFILL_BLOCK = 256  #: prompt tokens per forward pass: attention needs block x prompt, not n x n


class Observer(Protocol):
    """Sees every forward pass; `arborsim_torch.capture.Capture` is the one there is."""

    query_layers: frozenset[int]
    row_layers: frozenset[int]
    wants_attention: bool
    wants_hidden: bool

    def forward(
        self, decoder: TreeDecoder, state: BatchState, hidden: list[Tensor], last: Tensor
    ) -> None:
        """Tokens were computed: one per lane, or a block of the prompt.

        Parameters
        ----------
        hidden : list of Tensor ``[lanes, queries, size]``
            Output of every block; empty if nobody wants them.
        last : Tensor ``[lanes, queries, size]``
            Normalised last hidden state.
        """


class TreeDecoder:
    """Decodes the leaves of one tree.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model of the Llama family, in evaluation mode.  Its attention
        implementation is set to arborsim's.
    observer : Observer, optional
        Sees the forward passes that are made anyway.
    prefill_block : int
        Prompt tokens per forward pass.
    cache : TieredCache, optional
        A new one for `model`; by default one that keeps everything in HBM.
    """

    def __init__(
        self,
        model: Any,
        observer: Observer | None = None,
        prefill_block: int = PREFILL_BLOCK,
        cache: TieredCache | None = None,
    ) -> None:
        attention.register()
        if model.config._attn_implementation != attention.NAME:
            model.set_attn_implementation(attention.NAME)
        self.model = model
        self.observer = observer
        self.prefill_block = prefill_block
        self.cache = TieredCache(Layout.of(model)) if cache is None else cache

    @torch.inference_mode()
    def prefill(
        self, token_ids: Sequence[int], on_block: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """Compute the prompt as node 0.

        Parameters
        ----------
        token_ids : sequence of int
        on_block : callable, optional
            Gets every block's logits, ``[block, vocabulary]``.

        Returns
        -------
        Tensor ``[vocabulary]``
            Logits after the last token.
        """
        self.cache.open(0, -1)
        self.cache.activate([0])
        ids = np.array([list(token_ids)])
        logits = None
        for start in range(0, ids.shape[1], self.prefill_block):
            block = ids[:, start : start + self.prefill_block]
            # One row of logits is enough when nobody looks at the others.
            keep = 0 if on_block is not None else 1
            logits = self._forward(block, keep)[0]
            if on_block is not None:
                on_block(logits)
        assert logits is not None
        return logits[-1]

    def open(self, node: int, parent: int) -> None:
        """Add a node under a complete one."""
        self.cache.open(node, parent)

    def activate(self, leaves: Sequence[int]) -> None:
        """Turn to these leaves, in this batch order."""
        self.cache.activate(leaves)

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Tensor:
        """Append one token to each active leaf (in batch order).

        Returns
        -------
        Tensor ``[leaves, vocabulary]``
            Logits after these tokens.
        """
        return self._forward(np.reshape(np.asarray(tokens), (-1, 1)), 1)[:, 0]

    @torch.inference_mode()
    def recompute(self, leaf: int, tokens: np.ndarray) -> None:
        """Compute lost tokens on the path of `leaf` again, in order of position.

        Everything else on the path that is readable is attended to.  The caller has given the
        tokens slots (`arborsim_torch.cache.mover.Mover.restore`).
        """
        leaves = list(self.cache.leaves)
        for start in range(0, len(tokens), self.prefill_block):
            block = tokens[start : start + self.prefill_block]
            ids = self.cache.vocabulary_id.values[block].astype(np.int64)[None]
            self._run(ids, self.cache.again(leaf, block), 1, observed=False)
        self.cache.activate(leaves)

    def drop(self, node: int) -> None:
        """Free a node that no path will need again."""
        self.cache.drop(node)

    def _forward(self, ids: np.ndarray, keep: int) -> Tensor:
        return self._run(ids, self.cache.begin(ids), keep, observed=self.observer is not None)

    def _run(self, ids: np.ndarray, reading: Reading, keep: int, observed: bool) -> Tensor:
        state = BatchState(reading)
        hidden: list[Tensor] = []
        inner = self.model.model
        inputs = {
            "input_ids": torch.from_numpy(ids).to(self.model.device),
            "position_ids": reading.at,
            "past_key_values": self.cache.hf,
            "use_cache": True,
            "batch": state,
        }
        if observed:
            assert self.observer is not None
            state.collect = self.observer.wants_attention
            state.query_layers = self.observer.query_layers
            state.row_layers = self.observer.row_layers
            layers = inner.layers if self.observer.wants_hidden else ()
            with _block_outputs(layers, hidden):
                last = inner(**inputs).last_hidden_state
            self.observer.forward(self, state, hidden, last)
        else:
            last = inner(**inputs).last_hidden_state
        logits: Tensor = self.model.lm_head(last[:, -keep:] if keep else last)
        return logits


@contextmanager
def _block_outputs(layers: Any, into: list[Tensor]) -> Iterator[None]:
    """Collect the output of every block.

    Hooks, not ``output_hidden_states``: its last entry is the normalised state, not the last
    block's output.
    """

    def hook(_module: Any, _args: Any, output: Any) -> None:
        into.append(output[0] if isinstance(output, tuple) else output)

    handles = [layer.register_forward_hook(hook) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
