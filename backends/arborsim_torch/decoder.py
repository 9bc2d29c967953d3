"""A live decoder for a tree of thoughts: one forward pass per iteration for all active leaves.

>>> decoder = TreeDecoder(model)
>>> logits = decoder.prefill(prompt_ids)          # node 0
>>> decoder.open(1, parent=0); decoder.open(2, parent=0)
>>> leaves = decoder.activate([1, 2])             # in batch order
>>> logits = decoder.step([token_1, token_2])     # [2, vocabulary]

The logits equal those of a plain forward pass over the path's tokens, to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from arborsim_torch import attention
from arborsim_torch.attention import BatchState
from arborsim_torch.tree_cache import TreeCache

PREFILL_BLOCK = 256  #: prompt tokens per forward pass: attention needs block x prompt, not n x n


class Observer(Protocol):
    """Sees every forward pass; `arborsim_torch.capture.Capture` is the one there is."""

    query_layers: frozenset[int]
    row_layers: frozenset[int]

    def forward(
        self, decoder: TreeDecoder, state: BatchState, hidden: list[Tensor], last: Tensor
    ) -> None:
        """Tokens were computed: one per lane, or a block of the prompt.

        Parameters
        ----------
        hidden : list of Tensor ``[lanes, queries, size]``
            Output of every block.
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

    Attributes
    ----------
    cache : TreeCache
    """

    def __init__(
        self, model: Any, observer: Observer | None = None, prefill_block: int = PREFILL_BLOCK
    ) -> None:
        attention.register()
        if model.config._attn_implementation != attention.NAME:
            model.set_attn_implementation(attention.NAME)
        self.model = model
        self.observer = observer
        self.prefill_block = prefill_block
        config = model.config
        head_dim = getattr(config, "head_dim", None)
        self.cache = TreeCache(
            config.num_hidden_layers,
            config.num_key_value_heads,
            head_dim or config.hidden_size // config.num_attention_heads,
            model.dtype,
            model.device,
        )

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
        ids = torch.tensor([list(token_ids)], device=self.model.device)
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

    @torch.inference_mode()
    def activate(self, leaves: Sequence[int]) -> list[int]:
        """Turn to these leaves; returns them in batch order."""
        return self.cache.activate(leaves)

    @torch.inference_mode()
    def step(self, tokens: Tensor | Sequence[int]) -> Tensor:
        """Append one token to each active leaf (in batch order).

        Returns
        -------
        Tensor ``[leaves, vocabulary]``
            Logits after these tokens.
        """
        ids = torch.as_tensor(tokens, device=self.model.device).reshape(-1, 1)
        return self._forward(ids, 1)[:, 0]

    def drop(self, node: int) -> None:
        """Free a node that no path will need again."""
        self.cache.drop(node)

    def _forward(self, ids: Tensor, keep: int) -> Tensor:
        _rows, queries = ids.shape
        lengths, ragged = self.cache.expect(queries)
        first = torch.tensor(lengths, device=ids.device)
        state = BatchState(first, queries, self.cache.slots, ragged)
        position_ids = first[:, None] + torch.arange(queries, device=ids.device)
        hidden: list[Tensor] = []
        inner = self.model.model
        options = {"past_key_values": self.cache.hf, "use_cache": True, "batch": state}
        if self.observer is None:
            last = inner(input_ids=ids, position_ids=position_ids, **options).last_hidden_state
        else:
            state.collect, state.query_layers = True, self.observer.query_layers
            state.row_layers = self.observer.row_layers
            with _block_outputs(inner.layers, hidden):
                last = inner(input_ids=ids, position_ids=position_ids, **options).last_hidden_state
            self.observer.forward(self, state, hidden, last)
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
