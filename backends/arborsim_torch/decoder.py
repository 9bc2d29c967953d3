"""A live decoder for a tree of thoughts: one forward pass per iteration for all active leaves.

>>> decoder = TreeDecoder(model)
>>> logits = decoder.prefill(prompt_ids)          # node 0
>>> decoder.open(1, parent=0); decoder.open(2, parent=0)
>>> decoder.activate([1, 2])
>>> logits = decoder.step([token_1, token_2])     # [2, vocabulary]

The logits equal those of a plain forward pass over the path's tokens, to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from arborsim_torch import attention
from arborsim_torch.cache.forward import AttentionMetadata
from arborsim_torch.cache.hf import BatchedCaches, hf_cache
from arborsim_torch.cache.layout import Layout
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.context import ForwardContext, PassContext
from arborsim_torch.static import StaticStep, block_outputs, refusal
from arborsim_torch.tiers.copies import to_device

PREFILL_BLOCK = 256  #: prompt tokens per forward pass: attention needs block x prompt, not n x n
_GPU_BLOCK = 1024  # below this, launching a large model's kernels takes longer than they do


def prefill_block(device: torch.device) -> int:
    """Prompt tokens per forward pass of a live search on a device."""
    return _GPU_BLOCK if device.type == "cuda" else PREFILL_BLOCK


class ObservedCache(Protocol):
    """A decoder's cache as its observer sees it (`TieredCache` says what each means)."""

    @property
    def leaves(self) -> list[int]: ...

    @property
    def kv_heads(self) -> int: ...

    def length(self, seq: int) -> int: ...

    def readable(self, seq: int) -> np.ndarray | None: ...

    def parent(self, node: int) -> int: ...

    def newest(self, count: int) -> Tensor: ...

    def keys(self, layer: int, head: int) -> Tensor: ...


class Observed(Protocol):
    """A decoder as its observer sees it."""

    @property
    def cache(self) -> ObservedCache: ...


class Observer(Protocol):
    """Sees every forward pass; `arborsim_torch.capture.Capture` is the one there is."""

    @property
    def wants_attention(self) -> bool:
        """Whether it takes queries, or what attention gives."""
        ...

    @property
    def wants_hidden(self) -> bool:
        """Whether it takes the output of every block."""
        ...

    def context(self, metadata: AttentionMetadata) -> PassContext:
        """The context that the pass is to fill."""

    def forward(
        self, decoder: Observed, state: PassContext, hidden: list[Tensor], last: Tensor
    ) -> None:
        """Take a pass: one token per sequence, or a block of the prompt.

        What is shown may be overwritten by the next pass: what is needed of it is copied.  `hidden`
        are the outputs ``[seqs, queries, size]`` of every block, and empty if the observer does not
        want them, or has taken them as they came (`PassContext.take_output`).  `last` is the
        normalised last hidden state.
        """


class TreeDecoder:
    """Decodes the leaves of one tree.

    `model` is of the Llama family, in evaluation mode; its attention becomes arborsim's.  The
    observer sees the forward passes that are made anyway, of `prefill_block` prompt tokens each at
    first.  Without a `cache` one is made that keeps everything in HBM.  On CUDA, `graphs` replays
    decode steps as graphs wherever they can be captured.  `static` computes the steps that it can,
    on tensors that stay where they are.
    """

    def __init__(
        self,
        model: Any,
        observer: Observer | None = None,
        prefill_block: int = PREFILL_BLOCK,
        cache: TieredCache | None = None,
        graphs: bool = True,
    ) -> None:
        attention.register()
        if model.config._attn_implementation != attention.NAME:
            model.set_attn_implementation(attention.NAME)
        self.model = model
        self.observer = observer
        self.prefill_block = prefill_block
        self.cache = TieredCache(Layout.of(model)) if cache is None else cache
        self.static: StaticStep | None = None
        if graphs and self.cache.layout.device.type == "cuda" and not refusal(model):
            self.static = StaticStep(model, self.cache, graphs=True)

    @torch.inference_mode()
    def prefill(
        self, token_ids: Sequence[int], on_block: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """Compute the prompt as node 0; logits ``[vocabulary]`` after the last token.

        `on_block` gets every block's logits, ``[block, vocabulary]``.
        """
        self.cache.open(0, -1)
        self.cache.activate([0])
        ids = np.array([list(token_ids)])
        newest = None
        for start in range(0, ids.shape[1], self.prefill_block):
            block = ids[:, start : start + self.prefill_block]
            # Without `on_block` one row of logits is enough.
            keep = 0 if on_block is not None else 1
            logits = self._forward(block, keep)[0]
            if on_block is not None:
                on_block(logits)
            newest = logits[-1].clone()  # a view would keep the whole block's
            del logits
        assert newest is not None
        return newest

    def open(self, node: int, parent: int) -> None:
        """Add a node under a complete one."""
        self.cache.open(node, parent)

    def activate(self, leaves: Sequence[int]) -> None:
        """Turn to these leaves, in this batch order."""
        self.cache.activate(leaves)

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Tensor:
        """Append one token to each active leaf, in batch order; logits ``[leaves, vocabulary]``."""
        return self._forward(np.reshape(np.asarray(tokens), (-1, 1)), 1)[:, 0]

    @torch.inference_mode()
    def read(self, ids: np.ndarray) -> Tensor:
        """Append tokens, int64 ``[1, n]``, to the only leaf; logits ``[n, vocabulary]``."""
        return self._forward(ids, 0)[0]

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
            run_together([Pass(self, ids, self.cache.recompute(leaf, block), 1, observed=False)])
        self.cache.activate(leaves)

    def drop(self, node: int) -> None:
        """Free a node that no path will need again."""
        self.cache.drop(node)

    def prepare(self, tokens: Sequence[int]) -> Pass:
        """The pass of `step`, to be computed together with others (`run_together`)."""
        return self._pass(np.reshape(np.asarray(tokens), (-1, 1)), 1)

    def _pass(self, ids: np.ndarray, keep: int) -> Pass:
        return Pass(self, ids, None, keep, self.observer is not None)

    def _forward(self, ids: np.ndarray, keep: int) -> Tensor:
        return _computed([self._pass(ids, keep)])[0]


@dataclass(frozen=True)
class Pass:
    """Tokens that a decoder is to compute."""

    decoder: TreeDecoder
    ids: np.ndarray  #: int64 ``[seqs, queries]``
    #: None if the tokens are new, and announced to the cache when they are computed
    metadata: AttentionMetadata | None
    keep: int  #: queries whose logits are wanted, counted from the last; 0 for all
    observed: bool  #: whether the decoder's observer sees the pass

    @property
    def wants_hidden(self) -> bool:
        """Whether the observer wants the output of every block."""
        observer = self.decoder.observer
        return self.observed and observer is not None and observer.wants_hidden

    @property
    def static(self) -> StaticStep | None:
        """The step that computes the pass on tensors that stay; None if none can."""
        static = self.decoder.static
        fits = static is not None and self.metadata is None and self.ids.shape[1] == 1
        return static if fits and static is not None and static.possible else None

    def begin(self) -> PassContext:
        """Announce the tokens to the cache; what the attention function needs to know."""
        metadata = self.metadata
        return self.state(self.decoder.cache.begin(self.ids) if metadata is None else metadata)

    def state(self, metadata: AttentionMetadata) -> PassContext:
        """The context of the pass."""
        observer = self.decoder.observer
        if not self.observed or observer is None:
            return PassContext(metadata)
        return observer.context(metadata)

    def observe(self, state: PassContext, hidden: list[Tensor], last: Tensor) -> None:
        """Show the observer what came of it."""
        observer = self.decoder.observer
        if self.observed and observer is not None:
            shown = hidden if observer.wants_hidden else []
            observer.forward(self.decoder, state, shown, last)


@torch.inference_mode()
def run_together(passes: Sequence[Pass]) -> list[Tensor]:
    """Compute passes of decoders of one model in one forward; all have as many queries.

    Returns a list of Tensor ``[seqs, keep or queries, vocabulary]``.
    """
    return _computed(passes)


def _computed(passes: Sequence[Pass]) -> list[Tensor]:
    """`run_together`, in inference mode already."""
    steps = [step for one in passes if (step := one.static) is not None]
    if len(steps) == len(passes):
        return _static(passes, steps)
    model = passes[0].decoder.model
    caches = [one.decoder.cache for one in passes]
    alone = len(passes) == 1
    layout = passes[0].decoder.cache.layout
    states = [one.begin() for one in passes]
    seqs = [state.metadata.num_seqs for state in states]
    watched = any(one.wants_hidden for one in passes)
    ids = passes[0].ids if alone else np.concatenate([one.ids for one in passes])
    at = [state.metadata.at for state in states]
    hidden: list[Tensor] = []
    take = states[0].take_output or hidden.append  # of a block of one sequence, alone
    with block_outputs(model.model.layers, take) if watched else nullcontext():
        last = model.model(
            input_ids=to_device(ids, layout.device),
            position_ids=at[0] if alone else torch.cat(at),
            past_key_values=(
                caches[0].hf if alone else hf_cache(BatchedCaches(caches, seqs), layout.layers)
            ),
            use_cache=True,
            context=ForwardContext(states),
        ).last_hidden_state
    logits, first = [], 0
    for one, state, count in zip(passes, states, seqs, strict=True):
        rows = slice(first, first + count)
        own = last if alone else last[rows]
        if one.observed:
            one.observe(state, [h[rows] for h in hidden], own)
        logits.append(own if one.keep in (0, own.shape[1]) else own[:, -one.keep :])
        first += count
    if alone or len({part.shape[1] for part in logits}) > 1:
        return [model.lm_head(part) for part in logits]
    return list(model.lm_head(torch.cat(logits)).split(seqs))


def _static(passes: Sequence[Pass], steps: Sequence[StaticStep]) -> list[Tensor]:
    """The logits of passes, ``[seqs, 1, vocabulary]`` each."""
    states = [one.state(step.begin(one.ids)) for one, step in zip(passes, steps, strict=True)]
    watched = any(one.wants_hidden for one in passes)
    outputs = steps[0].run(states, watched, steps[1:])
    for one, own in zip(passes, outputs, strict=True):
        one.observe(own.states[0], own.hidden, own.last)
    return [own.logits.clone() for own in outputs]
