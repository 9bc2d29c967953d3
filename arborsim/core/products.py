"""The matrix products of a forward pass, and the types that their matrices can be quantised to.

With latent attention, the product `KV_B` expands latent vectors into keys and values at prefill.  A
decode step absorbs the same matrix into queries and outputs instead, as batched products of as many
operations per token: a table of attention kernels that includes these leaves `KV_B` out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from arborsim.core.geometry import Geometry

#: Bits of a quantised weight, its share of the scales included: one scale of 32 bits per block of
#: 128 x 128, of 16 bits per group of 128, of 8 bits per group of 16 and of 8 bits per group of 32.
WEIGHT_BITS = {
    "fp8": 8.0,
    "fp8_block": 8 + 32 / 128**2,
    "int4": 4 + 16 / 128,
    "nvfp4": 4 + 8 / 16,
    "mxfp4": 4 + 8 / 32,
}
#: Names of products that a reader of the list may need to distinguish.
HEAD, ROUTER, KV_B = "head", "router", "kv_b"


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
    """What a fused kernel computes for a token: gate, up and down of some routed experts.

    An expert has ``3 x hidden x expert_dim`` weights on one GPU.
    """

    hidden: int
    expert_dim: int
    experts: int
    experts_per_token: int
    layers: int  #: that have experts
    weights: str = ""  #: as `Product`


def products(geometry: Geometry, gpus: int) -> tuple[Product, ...]:
    """The products of a pass on one of `gpus` under tensor parallelism, without routed experts.

    Each is done for every token, but for the output `HEAD`: once per sequence.  What `gpus` does
    not divide is rounded up; KV heads are replicated if there are fewer, and so are routers and the
    first projections of latent attention.
    """
    g = geometry
    found = _latent_attention(g, gpus) if g.latent_dim else _attention(g, gpus)
    found += _feed_forward(g, "", g.intermediate, g.layers - g.expert_layers, gpus)
    if g.experts:
        found.append(Product(ROUTER, g.experts, g.hidden, g.expert_layers))
        found += _feed_forward(g, "shared_", g.shared_dim, g.expert_layers, gpus)
    found.append(Product(HEAD, _share(g.vocab, gpus), g.hidden, 1))
    return tuple(each for each in found if each.size)


def experts_product(geometry: Geometry, gpus: int) -> ExpertsProduct:
    """What the routed experts compute on one of `gpus`, each of which has a part of every one."""
    g = geometry
    return ExpertsProduct(
        g.hidden, _share(g.expert_dim, gpus), g.experts, g.experts_per_token, g.expert_layers,
        g.expert_type,
    )  # fmt: skip


def _attention(g: Geometry, gpus: int) -> list[Product]:
    heads = _share(g.heads, gpus)
    fused = (heads + 2 * _share(g.kv_heads, gpus)) * g.head_dim
    return [
        Product("qkv", fused, g.hidden, g.layers, g.weights),
        Product("output", g.hidden, heads * g.head_dim, g.layers, g.weights),
    ]


def _latent_attention(g: Geometry, gpus: int) -> list[Product]:
    """As servers fuse it: both first projections are one product if queries have a rank, too."""
    heads, latent = _share(g.heads, gpus), g.latent_dim + g.rope_dim
    shapes = {
        "q_a_kv_a": (g.query_rank + latent, g.hidden),
        "q_b": (heads * g.head_dim, g.query_rank),
    }
    if not g.query_rank:
        shapes = {"query": (heads * g.head_dim, g.hidden), "kv_a": (latent, g.hidden)}
    shapes[KV_B] = heads * (g.head_dim - g.rope_dim + g.value_dim), g.latent_dim
    shapes["output"] = g.hidden, heads * g.value_dim
    return [Product(name, *shape, g.layers, g.weights) for name, shape in shapes.items()]


def _feed_forward(g: Geometry, prefix: str, width: int, layers: int, gpus: int) -> list[Product]:
    """Gate and up, fused, and down."""
    part = _share(width, gpus)
    return [
        Product(f"{prefix}gate_up", 2 * part, g.hidden, layers, g.weights),
        Product(f"{prefix}down", g.hidden, part, layers, g.weights),
    ]


def _share(whole: int, gpus: int) -> int:
    """One GPU's part, rounded up."""
    return -(-whole // gpus)
