"""The shape of a model: what its KV cache holds, and what its forward pass computes and reads.

A cache must not be counted wrongly, so there are these kinds of layers:

- *full attention* keeps keys and values of every token: ``2 H_kv d`` numbers.
- *latent attention* (MLA) keeps one compressed vector and one rotary key of every token, from which
  all heads derive theirs (DeepSeek-V2, arXiv:2405.04434, section 2.1).
- *sliding-window attention* keeps keys and values of the newest `window` tokens of a sequence only,
  and so do layers that attend within chunks of that many tokens.
- *recurrent layers* keep a state of fixed size of every sequence, `state_bytes` over all of them.
- layers that read the cache of another keep nothing.

Of the weights, only the matrices of the layers are ever quantised: embeddings, output head, norms,
biases and routers keep their width.

With latent attention, the product `KV_B` expands latent vectors into keys and values at prefill.  A
decode step absorbs the same matrix into queries and outputs instead, as batched products of as many
operations per token: a table of attention kernels that includes these leaves `KV_B` out.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import numpy as np
from msgspec import Meta

Count = Annotated[int, Meta(ge=1)]
_OrNone = Annotated[int, Meta(ge=0)]  # 0: the model has no such thing
#: `Geometry.tokens_in` of a cache that does not grow any more.
UNBOUNDED = 1 << 62
_MOST_TOKEN_BYTES, _MOST_PARAMETERS = 1 << 36, 10**16
#: Bits of a quantised weight, its share of the scales included: one scale of 32 bits per block of
#: 128 x 128, of 16 bits per group of 128 or 32, of 8 bits per group of 16 and of 32.
WEIGHT_BITS = {
    "fp8": 8.0,
    "fp8_block": 8 + 32 / 128**2,
    "int4": 4 + 16 / 128,
    "int4_32": 4 + 16 / 32,
    "nvfp4": 4 + 8 / 16,
    "mxfp4": 4 + 8 / 32,
}
#: Names of products that a reader of the list may need to distinguish.
HEAD, ROUTER, KV_B = "head", "router", "kv_b"


@dataclass(frozen=True)
class Matrix:
    """A matrix of some layers, whole, and how tensor parallelism divides it.

    `split` says which side GPUs share: ``"out"``, ``"in"``, or neither.  `unit` features of it stay
    together (those of a head).  The last `kv_features` of a projection of queries, keys and values
    are divided by themselves, in units of `kv_unit`, and held again where there are too few.
    """

    name: str
    out_features: Count
    in_features: Count
    layers: Count
    split: str = ""
    unit: Count = 1
    kv_features: _OrNone = 0
    kv_unit: Count = 1

    def on(self, gpus: int, weights: str) -> Product:
        """The product on one of `gpus`, with its quantised matrices of type `weights`."""
        out, inner = self.out_features, self.in_features
        if self.split == "out":
            out = _share((out - self.kv_features) // self.unit, gpus) * self.unit
            out += _share(self.kv_features // self.kv_unit, gpus) * self.kv_unit
        elif self.split == "in":
            inner = _share(inner // self.unit, gpus) * self.unit
        kind = "" if self.name in (HEAD, ROUTER) else weights
        return Product(self.name, out, inner, self.layers, kind)


class Product(NamedTuple):
    """``[tokens, in_features] x [in_features, out_features]`` on one GPU."""

    name: str
    out_features: int
    in_features: int
    times: int  #: layers that have it
    weights: str = ""  #: type of the matrix, one of `WEIGHT_BITS`; empty if it is not quantised

    @property
    def size(self) -> int:
        """Weights of the matrices of all layers, on one GPU."""
        return self.out_features * self.in_features * self.times


class ExpertsProduct(NamedTuple):
    """Gate, up and down of some routed experts, which one fused kernel computes for a token.

    An expert has ``3 x hidden x expert_dim`` weights on one GPU.
    """

    hidden: int
    expert_dim: int
    experts: int
    experts_per_token: int
    layers: int  #: that have experts
    weights: str = ""  #: as `Product`


@dataclass(frozen=True)
class Geometry:
    """The shape of a model. A `ValueError` if its numbers contradict each other."""

    name: str
    #: As in the model's configuration (`heads` are query heads; `head_dim` is that of queries and
    #: keys)
    layers: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    hidden: Count
    intermediate: Count
    vocab: Count
    parameters: Count  # number of weights
    #: 2 for bf16 and fp16, 4 for fp32, 1 for FP8
    kv_bytes_per_element: Count = 2
    #: Of a weight that is not quantised, and of activations
    weight_bytes_per_element: Count = 2
    #: Latent attention: compressed vector (``kv_lora_rank``), rotary key (``qk_rope_head_dim``) and
    #: values of a head (``v_head_dim``); all 0 without it
    latent_dim: _OrNone = 0
    rope_dim: _OrNone = 0
    value_dim: _OrNone = 0
    #: Tokens that a query sees in layers with a sliding window, itself included, and the number of
    #: such layers; 0 without them
    window: _OrNone = 0
    window_layers: _OrNone = 0
    #: Mixture of experts: experts of a layer that are routed to, how many a token uses, and the
    #: weights of all of them in all layers; 0 without them
    experts: _OrNone = 0
    experts_per_token: _OrNone = 0
    expert_parameters: _OrNone = 0
    #: Width of an expert (``moe_intermediate_size``), layers that have experts, and width of the
    #: experts together that every token uses
    expert_dim: _OrNone = 0
    expert_layers: _OrNone = 0
    shared_dim: _OrNone = 0
    #: Latent attention: rank of the queries' projection (``q_lora_rank``), 0 if it is one matrix
    query_rank: _OrNone = 0
    #: Type of the matrices of the layers, one of `WEIGHT_BITS`, or empty if they are not quantised;
    #: and of the routed experts, or empty if it is the same
    weights: str = ""
    expert_weights: str = ""
    #: Layers that keep no token: of a recurrent state, without attention, or reading another's
    cacheless_layers: _OrNone = 0
    #: Numbers that a layer with a window keeps of a token, where others keep another number
    window_elements: _OrNone = 0
    #: Recurrent states and convolutions of a sequence, over all layers
    state_bytes: _OrNone = 0
    #: Keys of an index that chooses tokens: bytes of a token over all layers
    index_bytes_per_token: _OrNone = 0
    #: 1 if routed experts have no gate: two matrices in place of three
    ungated_experts: _OrNone = 0
    #: Matrices of the layers and the output, where they are not `usual_matrices`
    matrices: tuple[Matrix, ...] = ()

    def __post_init__(self) -> None:
        # Sums over a trace's tokens stay within 64 bits.
        if self.kv_bytes_per_token > _MOST_TOKEN_BYTES or self.parameters > _MOST_PARAMETERS:
            raise ValueError(
                "no model is so large: more than 64 GiB for a token, or more than 10^16 weights"
            )
        if self.latent_dim and not self.value_dim:
            raise ValueError("latent_dim and value_dim go together")
        _all_or_none("window and window_layers", self.window, self.window_layers)
        if not self.experts and (self.expert_dim or self.shared_dim or self.expert_weights):
            raise ValueError("there are no experts that could have a width or a type")
        if self.query_rank and not self.latent_dim:
            raise ValueError("query_rank and latent_dim go together")
        for kind in (self.weights, self.expert_weights):
            if kind and kind not in WEIGHT_BITS:
                raise ValueError(f"weights are {kind!r}, which is none of {', '.join(WEIGHT_BITS)}")
        if self.expert_layers > self.layers:
            raise ValueError(f"{self.expert_layers} of {self.layers} layers have experts")
        experts = (self.experts, self.experts_per_token, self.expert_parameters)
        names = "experts, experts_per_token, expert_parameters, expert_dim and expert_layers"
        _all_or_none(names, *experts, self.expert_dim, self.expert_layers)
        if self._expert_matrices > self.expert_parameters:
            raise ValueError("expert_dim is wider than expert_parameters allows")
        if self.window_layers and self.window_layers > self.layers:
            raise ValueError(f"{self.window_layers} of {self.layers} layers have a window")
        if self.window_layers + self.cacheless_layers > self.layers:
            raise ValueError(f"{self.cacheless_layers} of {self.layers} layers keep no token")
        if self.experts and not (
            self.experts_per_token <= self.experts and self.expert_parameters < self.parameters
        ):
            raise ValueError("there are fewer experts, or weights, than are used")

    @property
    def elements_per_layer(self) -> int:
        """Numbers that one layer keeps of one token."""
        if self.latent_dim:
            return self.latent_dim + self.rope_dim
        return self.kv_heads * (self.head_dim + (self.value_dim or self.head_dim))

    @property
    def vectors_per_layer(self) -> int:
        """Vectors that they make up: a scale each when quantised."""
        return 1 if self.latent_dim else 2 * self.kv_heads

    @property
    def tensors_per_layer(self) -> int:
        """Tensors that they lie in: keys and values, or the latent vectors."""
        return 1 if self.latent_dim else 2

    @property
    def layer_bytes_per_token(self) -> int:
        """Bytes that one layer keeps of one token."""
        return self.elements_per_layer * self.kv_bytes_per_element

    @property
    def full_layers(self) -> int:
        """Layers that keep every token, which a policy can manage."""
        return self.layers - self.window_layers - self.cacheless_layers

    @property
    def kv_bytes_per_token(self) -> int:
        """One token over all layers, as long as it is in the windows: ``2 L H_kv d b`` bytes."""
        return self.full_bytes_per_token + self.window_bytes_per_token

    @property
    def full_bytes_per_token(self) -> int:
        """One token over the layers that keep every token."""
        return self.full_layers * self.layer_bytes_per_token

    @property
    def window_bytes_per_token(self) -> int:
        """One token over the layers that keep it while it is in their window."""
        elements = self.window_elements or self.elements_per_layer
        return self.window_layers * elements * self.kv_bytes_per_element

    def windowed(self, tokens: Any) -> Any:
        """How many of the tokens of a path (a number or an array) the window layers keep."""
        return np.minimum(tokens, self.window)

    @property
    def growing_bytes_per_token(self) -> int:
        """One token over what grows with every token: its full layers and their index."""
        return self.full_bytes_per_token + self.index_bytes_per_token

    def path_bytes(self, tokens: int) -> int:
        """Cache of a sequence of `tokens` tokens."""
        windowed = int(self.windowed(tokens)) * self.window_bytes_per_token
        return self.state_bytes + self.growing_bytes_per_token * tokens + windowed

    def tokens_in(self, room_bytes: int) -> int:
        """Tokens of the longest single sequence whose cache fits into `room_bytes`."""
        left = room_bytes - self.path_bytes(self.window)
        if left < 0 and self.window:
            each = self.growing_bytes_per_token + self.window_bytes_per_token
            return max(0, room_bytes - self.state_bytes) // each
        if left < 0:
            return 0
        each = self.growing_bytes_per_token
        return self.window + left // each if each else UNBOUNDED

    @property
    def expert_type(self) -> str:
        """Type of the routed experts, one of `WEIGHT_BITS`. Empty if they are not quantised."""
        return self.expert_weights or self.weights

    @cached_property
    def weight_bytes(self) -> int:
        """All weights, with the scales of quantised ones."""
        rest = self.parameters - self.expert_parameters
        matrices = self.layer_matrices if self.weights else 0
        return self._bytes(rest, matrices, self.weights) + self.expert_bytes

    def kv_copies(self, gpus: int) -> float:
        """How often all GPUs together hold a token: latent vectors and KV heads are repeated."""
        if self.latent_dim:
            return float(gpus)
        return _share(self.kv_heads, gpus) * gpus / self.kv_heads

    def weight_bytes_on(self, gpus: int, data_parallel_attention: bool) -> int:
        """All weights on all GPUs; attention's on each of them if it is data parallel."""
        if not data_parallel_attention or gpus == 1:
            return self.weight_bytes
        other = ("gate_up", "down", "shared_gate_up", "shared_down", HEAD, ROUTER)
        attention = sum(each.size for each in self.products() if each.name not in other)
        repeated = self._bytes(attention, attention, self.weights)
        return self.weight_bytes + (gpus - 1) * repeated

    @property
    def layer_matrix_bytes(self) -> int:
        """The matrices of the layers without routed experts, with the scales of quantised ones."""
        return self._bytes(self.layer_matrices, self.layer_matrices, self.weights)

    @cached_property
    def expert_bytes(self) -> int:
        """Routed experts of all layers, with the scales of quantised ones."""
        matrices = self._expert_matrices if self.expert_type else 0
        return self._bytes(self.expert_parameters, matrices, self.expert_type)

    def _bytes(self, parameters: int, matrices: int, kind: str) -> int:
        """Bytes of `parameters`, of which those in `matrices` are of a type."""
        if not kind:
            return parameters * self.weight_bytes_per_element
        matrices = min(matrices, parameters)  # a configuration may state its number of parameters
        rest = (parameters - matrices) * self.weight_bytes_per_element
        return rest + math.ceil(matrices * WEIGHT_BITS[kind] / 8)

    @property
    def _expert_matrices(self) -> int:
        """Weights of the routed experts without biases."""
        one = (2 if self.ungated_experts else 3) * self.hidden * self.expert_dim
        return one * self.experts * self.expert_layers

    @cached_property
    def layer_matrices(self) -> int:
        """Weights in the matrices of the layers that can be quantised, without routed experts."""
        return sum(each.size for each in self.products() if each.name not in (HEAD, ROUTER))

    @property
    def active_parameters(self) -> float:
        """Weights that one token uses."""
        return float(self._touched(1))

    def weight_bytes_read(self, tokens: Any) -> Any:
        """Weights that a pass over `tokens` tokens (a number or an array) is expected to read.

        Tokens choose their experts as if independently and evenly: of E experts, of which each
        token uses k, some token uses the share ``1 - (1 - k / E)^tokens``.
        """
        if not self.experts:
            return self.weight_bytes
        return self.weight_bytes - self.expert_bytes * self._unused(tokens)

    def _touched(self, tokens: Any) -> Any:
        if not self.experts:
            return self.parameters
        return self.parameters - self.expert_parameters * self._unused(tokens)

    def _unused(self, tokens: Any) -> Any:
        """The share of experts that a pass over `tokens` tokens is expected to leave out."""
        return (1 - self.experts_per_token / self.experts) ** tokens

    def products(self, gpus: int = 1) -> tuple[Product, ...]:
        """The matrix products of a pass on one of `gpus`, without those of routed experts.

        Under tensor parallelism.  Each is done for every token, but for the output `HEAD`: once per
        sequence.  What `gpus` does not divide is rounded up. KV heads are replicated if there are
        fewer, and so are routers and the first projections of latent attention.
        """
        return tuple(each.on(gpus, self.weights) for each in self.matrices or self.usual_matrices())

    def usual_matrices(self) -> tuple[Matrix, ...]:
        """Those of layers that all have the attention and the feed-forward part of Llama.

        Or the latent attention of DeepSeek, and routed experts.
        """
        found = self._latent_attention() if self.latent_dim else self._attention()
        found += feed_forward("", self.intermediate, self.hidden, self.layers - self.expert_layers)
        if self.experts:
            found.append((ROUTER, self.experts, self.hidden, self.expert_layers))
            found += feed_forward("shared_", self.shared_dim, self.hidden, self.expert_layers)
        found.append((HEAD, self.vocab, self.hidden, 1, "out"))
        return tuple(Matrix(*each) for each in found if all(each[1:4]))

    def experts_product(self, gpus: int = 1) -> ExpertsProduct | None:
        """The routed experts on one of `gpus`, which has a part of each. None without experts."""
        if not self.experts:
            return None
        sizes = self.hidden, _share(self.expert_dim, gpus), self.experts, self.experts_per_token
        return ExpertsProduct(*sizes, self.expert_layers, self.expert_type)

    def _attention(self) -> list[tuple[Any, ...]]:
        d, kv = self.head_dim, 2 * self.kv_heads * self.head_dim
        width = self.heads * d
        return [
            ("qkv", width + kv, self.hidden, self.layers, "out", d, kv, 2 * d),
            ("output", self.hidden, width, self.layers, "in", d),
        ]

    def _latent_attention(self) -> list[tuple[Any, ...]]:
        sizes = self.heads, self.head_dim, self.rope_dim, self.latent_dim, self.value_dim
        return latent_attention(self.hidden, self.layers, *sizes, self.query_rank)

    def score_flops(self, absorbed: bool) -> int:
        """Operations for one query and one key in one layer, all heads: score, weighted value.

        With latent attention a decode step scores the latent vectors themselves (*absorbed*). A
        prefill expands them into keys and values first.
        """
        if not self.latent_dim:
            return 2 * self.heads * (self.head_dim + (self.value_dim or self.head_dim))
        wide = 2 * self.latent_dim + self.rope_dim if absorbed else self.head_dim + self.value_dim
        return 2 * self.heads * wide

    @property
    def query_dim(self) -> int:
        """Numbers in the query of a head that meets what the cache holds."""
        return self.latent_dim + self.rope_dim if self.latent_dim else self.head_dim

    @property
    def output_dim(self) -> int:
        """Numbers in what a head makes of the cache."""
        return self.latent_dim or self.head_dim

    def to_dict(self) -> dict[str, Any]:
        """As it is stored: without the fields that say "none", which older readers do not know."""
        without = {each.name for each in fields(self) if each.default in (0, "", ())}
        given = asdict(self).items()
        return {name: value for name, value in given if value or name not in without}


def latent_attention(
    hidden: int, layers: int, heads: int, head_dim: int, rope: int, latent: int, value: int,
    rank: int,
) -> list[tuple[Any, ...]]:  # fmt: skip
    """Latent attention as servers fuse it, as arguments of `Matrix`.

    Both first projections are one if queries have a `rank`, too.
    """
    queries = heads * head_dim
    found: list[tuple[Any, ...]] = [
        ("q_a_kv_a", rank + latent + rope, hidden, layers),
        ("q_b", queries, rank, layers, "out", head_dim),
    ]
    if not rank:
        found = [
            ("query", queries, hidden, layers, "out", head_dim),
            ("kv_a", latent + rope, hidden, layers),
        ]
    each = head_dim - rope + value
    return [
        *found,
        (KV_B, heads * each, latent, layers, "out", each),
        ("output", hidden, heads * value, layers, "in", value),
    ]


def feed_forward(
    prefix: str, width: int, hidden: int, layers: int, gates: int = 2
) -> list[tuple[Any, ...]]:
    """Gate and up, fused, and down, as arguments of `Matrix`; without a gate `gates` is 1."""
    return [
        (f"{prefix}gate_up", gates * width, hidden, layers, "out", gates),
        (f"{prefix}down", hidden, width, layers, "in"),
    ]


def _share(whole: int, gpus: int) -> int:
    """One GPU's part, rounded up."""
    return -(-whole // gpus)


def _all_or_none(names: str, *values: int) -> None:
    if len({value > 0 for value in values}) > 1:
        raise ValueError(f"{names} go together")
