"""How much KV cache a GPU has room for, and how that comes about.

What a share of the memory leaves beside the weights is not all cache: activations, and what the
driver keeps for itself, come off first.
"""

from __future__ import annotations

from dataclasses import dataclass

from arborsim.core.errors import UsageError
from arborsim.core.geometry import UNBOUNDED, Geometry
from arborsim.machine.cost import CostModel
from arborsim.machine.profile import HardwareProfile

#: Of driver and libraries: 0.15 GiB for dense models in BLIS (read 2026-11).
CONTEXT_BYTES = int(0.15 * 2**30)


@dataclass(frozen=True)
class KvPool:
    """Where the memory of a GPU goes; ``pool_bytes`` is what the other parts leave.

    Attributes
    ----------
    hbm_bytes : int
    reserve_bytes : int
        What the profile's `reserve_share` keeps free.
    weight_bytes : int
    activation_bytes : int
        Of the largest pass, see `CostModel.workspace_bytes`.
    context_bytes : int
        Of driver and libraries.
    tokens : int
        Tokens of one sequence that fit into the pool; `UNBOUNDED` if it stops growing.
    """

    hbm_bytes: int
    reserve_bytes: int
    weight_bytes: int
    activation_bytes: int
    context_bytes: int
    tokens: int

    @property
    def pool_bytes(self) -> int:
        """Room for the cache; negative if the rest does not fit."""
        rest = self.reserve_bytes + self.weight_bytes + self.activation_bytes + self.context_bytes
        return self.hbm_bytes - rest

    @property
    def unbounded(self) -> bool:
        return self.tokens == UNBOUNDED


def kv_pool(
    profile: HardwareProfile, geometry: Geometry, *, pass_tokens: int = 8192, sequences: int = 1
) -> KvPool:
    """The room for the cache of `geometry` on `profile`.

    Parameters
    ----------
    profile : HardwareProfile
    geometry : Geometry
    pass_tokens, sequences : int
        Tokens that are computed together at most, and of how many sequences.
    """
    activations = CostModel(profile, geometry).workspace_bytes(pass_tokens, sequences)
    parts = {
        "hbm_bytes": profile.hbm_bytes,
        "reserve_bytes": profile.hbm_bytes - profile.usable_hbm_bytes,
        "weight_bytes": geometry.weight_bytes,
        "activation_bytes": activations,
        "context_bytes": CONTEXT_BYTES,
    }
    room = KvPool(**parts, tokens=0).pool_bytes
    return KvPool(**parts, tokens=geometry.tokens_in(room))


def concurrent_requests(
    memory_bytes: float, weight_bytes: float, tokens: int, kv_bytes_per_token: int
) -> int:
    """Requests of so many tokens that 0.9 of a memory holds beside the weights.

    ``floor((0.9 M - W) / (n b))``: EpiKV, arXiv:2606.26472, appendix I; activations and context are
    left out there.

    Raises
    ------
    UsageError
        Requests have no tokens, or tokens no bytes.
    """
    if tokens < 1 or kv_bytes_per_token < 1:
        raise UsageError("requests must have tokens, and tokens bytes, to be counted")
    return max(0, int((0.9 * memory_bytes - weight_bytes) // (tokens * kv_bytes_per_token)))
