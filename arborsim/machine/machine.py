"""What searches are simulated on, as one record; it makes an executor for each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from arborsim.core.errors import UsageError
from arborsim.core.tiers import Tier

if TYPE_CHECKING:
    from arborsim.machine.executor import SimulatedExecutor
    from arborsim.machine.profile import HardwareProfile
    from arborsim.policies.base import Policy
    from arborsim.trace.schema import Geometry, TraceInfo


@dataclass(frozen=True)
class Machine:
    """What the searches are replayed on.

    Attributes
    ----------
    profile : HardwareProfile
    geometry : Geometry or None
        Model whose bytes and seconds are charged; None for the recorded model's own.
    recall : {"stage", "stream", "near", "ondemand"}
        How tokens in DDR take part in attention.
    page_tokens : int
        KV slots per page.
    tree_attention : bool
        Whether shared ancestors are read once per batch, or once per branch.
    event_by_event : bool
        Simulate every decode iteration as an event of its own (slower, the same to rounding).
    explain : bool
        Keep every term of the time apart (`EpisodeResult.terms`).
    keep_matrices : bool
        A prefill that writes attention matrices out holds those of all layers at once.
    overlap : bool
        False waits for every transfer at once.
    """

    profile: HardwareProfile
    geometry: Geometry | None = None
    recall: str = "stage"
    page_tokens: int = 1
    tree_attention: bool = True
    event_by_event: bool = False
    explain: bool = False
    keep_matrices: bool = False
    overlap: bool = True

    def charged(self, recorded: TraceInfo) -> Geometry:
        """The model whose bytes and seconds are charged for a trace."""
        return self.geometry or recorded.geometry

    def executor(
        self,
        policy: Policy,
        recorded: TraceInfo,
        *,
        record: bool = False,
        prefix_tokens: int = 0,
    ) -> SimulatedExecutor:
        """A simulated machine for one search of a trace under `policy`.

        Parameters
        ----------
        policy : Policy
        recorded : TraceInfo
        record, prefix_tokens : bool, int
            As of `SimulatedExecutor`.

        Raises
        ------
        UsageError
            The policy has no meaning on the model: see `unsuited`.
        """
        from arborsim.machine.executor import SimulatedExecutor

        geometry = self.charged(recorded)
        if why := unsuited(policy, geometry):
            raise UsageError(why)
        return SimulatedExecutor(
            geometry,
            self.profile,
            groups=num_groups(policy, recorded),
            page_tokens=self.page_tokens,
            recall=self.recall,
            policy=policy.name,
            fused=policy.fused,
            tree_attention=self.tree_attention,
            overlap=self.overlap,
            event_by_event=self.event_by_event,
            explain=self.explain,
            keep_matrices=self.keep_matrices,
            record=record,
            prefix_tokens=prefix_tokens,
        )


def unsuited(policy: Policy, geometry: Geometry) -> str:
    """Why `policy` has no meaning on a model of this geometry; empty if it has."""
    tiers = policy.method.tiers
    if not geometry.full_layers and any(tier != Tier.HBM for tier in tiers):
        return (
            f"every layer of {geometry.name} forgets what its window of {geometry.window} tokens "
            f"has passed: there is nothing left that policy {policy.name} could manage"
        )
    if geometry.latent_dim and policy.grouping == "head":
        return (
            f"policy {policy.name} decides for each KV head, and {geometry.name} keeps one latent "
            "vector of a token for all heads: use a policy that decides per layer or for the model"
        )
    if geometry.kv_bytes_per_element == 1 and Tier.HBM_QUANTISED in tiers:
        return (
            f"policy {policy.name} moves tokens to 8 bits, and the cache of {geometry.name} is in "
            "8 bits already: use a policy that does not, or a cache in bf16"
        )
    return ""


def num_groups(policy: Policy, recorded: TraceInfo) -> int:
    """Cache groups that the plans of `policy` distinguish on a trace: see `Policy.grouping`."""
    layers = len(recorded.qkv_layers)
    return {"shared": 1, "layer": layers, "head": layers * recorded.geometry.kv_heads}[
        policy.grouping
    ]
