"""What shape a cache has, and which part of it each cache group is.

A *group* is what plans treat alike: the whole cache ("shared"), a layer, or a KV head of a layer.
Storage comes in *banks*: tensors whose tokens have the same slot in all layers of the bank.  A
shared plan needs one bank; otherwise every layer is a bank of its own, and with plans per head the
heads of a bank may hold different tokens in the same slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from arborsim.core.errors import UnknownName

GROUPINGS = ("shared", "layer", "head")


@dataclass(frozen=True)
class Layout:
    """Shape of a model's cache and the grouping of its plans.

    Attributes
    ----------
    layers, kv_heads, head_dim : int
    dtype : torch.dtype
        Of keys and values at full precision.
    device : torch.device
        Where the model is.
    grouping : {"shared", "layer", "head"}
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    grouping: str = "shared"

    def __post_init__(self) -> None:
        if self.grouping not in GROUPINGS:
            raise UnknownName("grouping", self.grouping, GROUPINGS)

    @classmethod
    def of(cls, model: Any, grouping: str = "shared") -> Layout:
        """The layout for a causal language model of transformers."""
        config = model.config
        head_dim = getattr(config, "head_dim", None)
        return cls(
            config.num_hidden_layers,
            config.num_key_value_heads,
            head_dim or config.hidden_size // config.num_attention_heads,
            model.dtype,
            model.device,
            grouping,
        )

    @cached_property
    def groups(self) -> int:
        return {"shared": 1, "layer": self.layers, "head": self.layers * self.kv_heads}[
            self.grouping
        ]

    @cached_property
    def banks(self) -> int:
        return 1 if self.grouping == "shared" else self.layers

    @property
    def bank_layers(self) -> int:
        """Layers per bank."""
        return self.layers // self.banks

    def bank_of_group(self, group: int) -> tuple[int, slice]:
        """The bank that a group lies in, and its KV heads there."""
        if self.grouping == "head":
            layer, head = divmod(group, self.kv_heads)
            return layer, slice(head, head + 1)
        return group, slice(None)

    def bank_of_layer(self, layer: int) -> tuple[int, int]:
        """The bank that a layer lies in, and its number there."""
        return (0, layer) if self.grouping == "shared" else (layer, 0)

    def groups_of_layer(self, layer: int) -> slice:
        """The groups that the tokens of a layer are told apart by."""
        if self.grouping == "shared":
            return slice(0, 1)
        size = self.kv_heads if self.grouping == "head" else 1
        return slice(layer * size, (layer + 1) * size)

    @property
    def elements_per_group(self) -> int:
        """Numbers in the keys and values of one token in one group."""
        return 2 * self.layers * self.kv_heads * self.head_dim // self.groups

    @property
    def scales_per_group(self) -> int:
        """Scales of one quantised token in one group: one per layer, KV head, and key or value."""
        return 2 * self.layers * self.kv_heads // self.groups
