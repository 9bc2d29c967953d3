"""Decode steps of Llama models with fused kernels between the matrix products.

While a static step computes, its layers' `forward` is that of `_FusedLayers`: the same operations
in the same order, through `arborsim_torch.kernels.layers_triton`.  Hooks of a layer run as always;
its parts are not called one by one, so hooks of theirs are a reason to leave the model as it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from arborsim_torch.attention import tree_attention
from arborsim_torch.kernels.piece import in_triton

#: If this is set, and not 0, steps are computed with the model's own operations.
SWITCH = "ARBORSIM_UNFUSED"
_CODE = "transformers.models.llama.modeling_llama"


_NORMS = ("input_layernorm", "post_attention_layernorm")
_PARTS = {"self_attn": "LlamaAttention", "mlp": "LlamaMLP", **dict.fromkeys(_NORMS, "LlamaRMSNorm")}


class Stores(Protocol):
    """A step, whose tokens are one per sequence."""

    @property
    def rows(self) -> int:
        """Sequences, those of the padding included."""
        ...

    def target(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of a layer's pool, and the slots that its tokens go to.

        As `arborsim_torch.kernels.layers_triton.rotate_and_store` takes them.
        """
        ...


def refusal(model: Any) -> str:
    """Why the layers of a model run unfused, in words; empty if they are fused."""
    if os.environ.get(SWITCH, "0") != "0":
        return f"{SWITCH} is set"
    if not in_triton(model.device, model.dtype):
        return "the kernels need Triton and a GPU"
    return unknown(model)


def unknown(model: Any) -> str:
    """Why the fused layers would not compute what a model does; empty if they would."""
    core = model.model
    turn: Any = getattr(core, "rotary_emb", None)
    if not _is(core, "LlamaModel") or not _is(turn, "LlamaRotaryEmbedding"):
        return f"layers of {type(core).__name__} have no fused form"
    if not _is(core.norm, "LlamaRMSNorm"):
        return "the last norm is not Llama's"
    for number, layer in enumerate(core.layers):
        if not _is(layer, "LlamaDecoderLayer", hooks=True):
            return f"layer {number} is not Llama's, or has another forward"
        for name, kind in _PARTS.items():
            if not _is(getattr(layer, name, None), kind):
                return f"{name} of layer {number} is not Llama's, or has hooks"
        if type(layer.mlp.act_fn).__name__ not in ("SiLUActivation", "SiLU"):
            return f"the activation of layer {number} is not SiLU"
        norms = (layer.input_layernorm, layer.post_attention_layernorm, core.norm)
        if any(norm.weight.dtype != model.dtype for norm in norms):
            return f"norms of layer {number} have weights of another type than the model"
        if 2 * turn.inv_freq.numel() != layer.self_attn.head_dim:
            return "a part of each head alone is turned"
    return ""


def _is(module: Any, name: str, hooks: bool = False) -> bool:
    """Whether a module is and computes as transformers' class; it may have `hooks`."""
    kind = type(module)
    if kind.__name__ != name or kind.__module__ != _CODE or "forward" in vars(module):
        return False
    return hooks or not (module._forward_hooks or module._forward_pre_hooks)


@contextmanager
def fused(model: Any, steps: Sequence[Stores]) -> Iterator[None]:
    """Let a model's layers compute a step for `steps`, whose rows follow each other, in kernels."""
    layers = _FusedLayers(model.model, steps)
    changed: list[nn.Module] = [*model.model.layers, model.model.norm]
    try:
        for number, layer in enumerate(model.model.layers):
            layer.forward = partial(layers.layer, number)
        model.model.norm.forward = partial(layers.normed, model.model.norm)
        yield
    finally:
        for module in changed:
            vars(module).pop("forward", None)


class _FusedLayers:
    """The layers of one step."""

    def __init__(self, core: Any, steps: Sequence[Stores]) -> None:
        from arborsim_torch.kernels import layers_triton

        self._kernels, self._steps = layers_triton, steps
        self._layers = list(core.layers)
        norms = [layer.input_layernorm for layer in self._layers[1:]]
        self._norm_after = [*norms, core.norm]
        self._ready: tuple[Tensor, Tensor] | None = None  # a layer's output, and its norm

    def normed(self, norm: Any, x: Tensor) -> Tensor:
        """The norm of a layer's output, computed with it, or of another tensor."""
        ready, self._ready = self._ready, None
        if ready is not None and ready[0] is x:
            return ready[1]
        return self._kernels.add_norm(x, None, norm.weight, norm.variance_epsilon)[1]

    def layer(
        self,
        number: int,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        context: Any,
        **_: Any,
    ) -> Tensor:
        """`LlamaDecoderLayer.forward` of one token per sequence."""
        layer = self._layers[number]
        attn, mlp, add_norm = layer.self_attn, layer.mlp, self._kernels.add_norm
        x = self.normed(layer.input_layernorm, hidden_states)
        projections: list[Callable[[Tensor], Tensor]] = [attn.q_proj, attn.k_proj, attn.v_proj]
        q, k, v = (projection(x)[:, 0] for projection in projections)
        query = q.new_empty((len(q), q.shape[1] // attn.head_dim, attn.head_dim))
        cos, sin = (part[:, 0] for part in position_embeddings)
        first = 0
        for step in self._steps:
            target = step.target(number)
            self._kernels.rotate_and_store((q, k, v), (cos, sin), query, first, target)
            first += step.rows
        out, _weights = tree_attention(
            attn, query[:, :, None], k, v, None, attn.scaling, context=context
        )
        out = attn.o_proj(out.reshape(len(q), 1, -1))
        norm = layer.post_attention_layernorm
        hidden, x = add_norm(out, hidden_states, norm.weight, norm.variance_epsilon)
        x = mlp.down_proj(self._kernels.silu_times(mlp.gate_proj(x), mlp.up_proj(x)))
        norm = self._norm_after[number]
        self._ready = add_norm(x, hidden, norm.weight, norm.variance_epsilon)
        return self._ready[0]
