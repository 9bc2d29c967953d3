"""How much KV cache a GPU has room for, and how that comes about.

What a share of the memory leaves next to the weights is not all cache: activations, and what the
driver keeps for itself, come off first.
"""

from __future__ import annotations

from dataclasses import dataclass

from arborsim.core.geometry import UNBOUNDED, Geometry
from arborsim.machine.cost import CostModel
from arborsim.machine.profile import HardwareProfile

#: Of driver and libraries: 0.15 GiB for dense models in BLIS (read 2026-11).
CONTEXT_BYTES = int(0.15 * 2**30)


@dataclass(frozen=True)
class KvRoom:
    """Where the memory of a GPU goes; ``pool_bytes`` is what the other parts leave."""

    hbm_bytes: int
    reserve_bytes: int  # what the profile's `reserve_share` keeps free
    weight_bytes: int
    activation_bytes: int  # of the largest pass, see `CostModel.workspace_bytes`
    context_bytes: int  # of driver and libraries
    tokens: int  # tokens of one sequence that fit into the pool; `UNBOUNDED` if it stops growing

    @property
    def pool_bytes(self) -> int:
        """Room for the cache; negative if the rest does not fit."""
        rest = self.reserve_bytes + self.weight_bytes + self.activation_bytes + self.context_bytes
        return self.hbm_bytes - rest

    @property
    def unbounded(self) -> bool:
        return self.tokens == UNBOUNDED


def kv_pool(profile: HardwareProfile, geometry: Geometry, *, pass_tokens: int = 8192) -> KvRoom:
    """The room for the cache of `geometry`; `pass_tokens` are computed together at most."""
    activations = CostModel(profile, geometry).workspace_bytes(pass_tokens)
    parts = {
        "hbm_bytes": profile.hbm_bytes,
        "reserve_bytes": profile.hbm_bytes - profile.usable_hbm_bytes,
        "weight_bytes": geometry.weight_bytes,
        "activation_bytes": activations,
        "context_bytes": CONTEXT_BYTES,
    }
    room = KvRoom(**parts, tokens=0).pool_bytes
    return KvRoom(**parts, tokens=geometry.tokens_in(room))
