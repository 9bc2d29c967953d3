"""The shape of a cache, which part of it each group is, and where a token can be stored.

A *group* is what plans treat alike: the whole cache ("shared"), a layer, or a KV head of a layer.
Storage comes in *slabs*: tensors whose tokens have the same slot in all layers of the slab.  A
shared plan needs one slab; otherwise every layer is a slab of its own, and with plans per head the
heads of a slab hold tokens, and numbers of them, of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
import torch

from arborsim.core.errors import UnknownName
from arborsim.core.tiers import RUNGS, by_tier

GROUPINGS = ("shared", "layer", "head")


@dataclass(frozen=True)
class Layout:
    """Shape of a model's cache and the grouping of its plans."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype  #: of keys and values at full precision
    device: torch.device  #: where the model is
    grouping: str = "shared"  #: {"shared", "layer", "head"}

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
    def slabs(self) -> int:
        return 1 if self.grouping == "shared" else self.layers

    @property
    def slab_layers(self) -> int:
        """Layers per slab."""
        return self.layers // self.slabs

    def slab_of_group(self, group: int) -> tuple[int, slice]:
        """The slab that a group lies in, and its KV heads there."""
        if self.grouping == "head":
            layer, head = divmod(group, self.kv_heads)
            return layer, slice(head, head + 1)
        return group, slice(None)

    def slab_of_layer(self, layer: int) -> tuple[int, int]:
        """The slab that a layer lies in, and its number there."""
        return (0, layer) if self.grouping == "shared" else (layer, 0)

    def groups_of_layer(self, layer: int) -> slice:
        """The groups of a layer: one, or one per KV head."""
        if self.grouping == "shared":
            return slice(0, 1)
        size = self.kv_heads if self.grouping == "head" else 1
        return slice(layer * size, (layer + 1) * size)

    @property
    def elements_per_group(self) -> int:
        """Numbers in the keys and values of one token in one group."""
        return 2 * self.layers * self.kv_heads * self.head_dim // self.groups


class Place(IntEnum):
    """A pool, or nowhere; a *staged* second copy of a token in DDR is read instead of it."""

    HBM = 0
    HBM_QUANTISED = 1
    HBM_COARSE = 2
    DDR = 3
    DDR_QUANTISED = 4
    DDR_COARSE = 5
    STAGING = 6
    STAGING_QUANTISED = 7
    STAGING_COARSE = 8
    LOST = 9

    @property
    def rung(self) -> int:
        """0 at full precision, else the number of the format, from 1: as `Tier.rung`."""
        return 0 if self == Place.LOST else self % RUNGS

    @property
    def quantised(self) -> bool:
        return self.rung > 0

    @property
    def in_hbm(self) -> bool:
        """A token's own copy on the device, in other words neither of DDR nor staged."""
        return self < Place.DDR

    @property
    def on_host(self) -> bool:
        return Place.DDR <= self < Place.STAGING

    @property
    def staged(self) -> bool:
        return Place.STAGING <= self < Place.LOST


#: The place of a tier's own copy, by value of `Tier`.
HOME = by_tier(lambda tier: int(Place.__members__.get(tier.name, Place.LOST))).astype(np.int8)
#: The place of the staged copy of a token whose own is in this place.
STAGED = {place: Place(place + RUNGS) for place in Place if place.on_host}
