"""The device memory of a live search, predicted from a simulation of the same search."""

from __future__ import annotations

from dataclasses import dataclass

from arborsim.core.geometry import Geometry
from arborsim.core.measurements import Measurements
from arborsim.core.observations import Signal
from arborsim.core.tiers import Tier
from arborsim.machine.live_memory import LiveSearch, last_rows_bytes, moving_bytes
from arborsim.memory.moves import MostMoved
from arborsim.policies.base import Policy, hidden_layers, read_as_norms, row_uses
from arborsim.trace.schema import PER_LAYER
from arborsim_torch.cache.layout import STAGED, Place
from arborsim_torch.cache.ondemand import PageAttention
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.capture import MAX_PENDING_BYTES
from arborsim_torch.token_signals import SKETCH_SIZE


def places_of(policy: Policy) -> list[Place]:
    """Where a policy's tokens can be."""
    tiers = policy.tiers
    return sorted({Place[tier.name] for tier in tiers if tier != Tier.EVICTED})


@dataclass(frozen=True)
class Forecast:
    """A search whose memory is asked for; sizes in tokens."""

    cache: TieredCache
    policy: Policy
    #: the prompt, and how much of it is computed at a time
    prompt: int
    block: int
    recall: str
    #: what the pool of HBM had from the start, and what it keeps
    reserved: int
    kept: int

    def memory(self, simulated: Measurements, geometry: Geometry, moved: MostMoved) -> LiveSearch:
        """The search's memory; `moved` is of the same simulation."""
        most, prompt, uses = moved.most_tokens, self.prompt, row_uses(self.policy)
        kept = most if moved.kept_tokens is None else moved.kept_tokens
        reduced = [use for use in uses if use.reduced and use.prompt and not use.of_heads]
        counted = [use for use in uses if use.prompt and use.keeps == "sparsity"]
        rows = [use for use in reduced if use.keeps != "sparsity"]
        waiting, own = self._waiting_bytes(geometry)
        quantised, others = self._apart_bytes(simulated, moved)
        staged, groups = self.recall == "stage", self.cache.layout.groups
        first, later = moving_bytes(moved, geometry, self.policy.formats, groups, staged)
        return LiveSearch(
            geometry,
            prompt,
            most,
            kept=kept if kept < prompt else None,
            reserved=self.reserved,
            keeps=self.kept,
            rows_from=min((use.first(prompt) for use in rows), default=None),
            counted_from=min((use.first(prompt) for use in counted), default=None),
            groups=groups,
            signals=not self.policy.reads() <= {Signal.READERS},
            waiting_bytes=waiting,
            own_bytes=own,
            last_rows_bytes=last_rows_bytes(uses, geometry, prompt),
            apart_bytes=quantised + others,
            first_apart_bytes=quantised,
            first_moving_bytes=first,
            moving_bytes=later,
            block=self.block,
            page=self.cache.pools[Place.HBM].page_tokens,
        )

    def _apart_bytes(self, simulated: Measurements, moved: MostMoved) -> tuple[int, int]:
        """Bytes that the pools of quantised tokens in HBM keep, and those of staged ones.

        Tokens that lie quantised in DDR are staged as they are.
        """
        pools, places, here, found = self.cache.pools, places_of(self.policy), 0, 0
        quantised, staged = simulated.peak_quantised_bytes, simulated.peak_staging_bytes
        if quantised and (own := [at for at in places if at.in_hbm and at.quantised]):
            here = max(quantised, sum(pools[at].kept_bytes for at in own))
        on_host = [at for at in places if at.on_host and moved.reached[Tier[at.name]]]
        attention = self.cache.host_attention
        if isinstance(attention, PageAttention):
            ddr = simulated.peak_ddr_bytes
            for at in on_host:
                size = pools[at].bytes_per_slot * pools[at].layout.groups
                found += attention.bytes_of(at, -(-ddr // size)) if quantised or not at.rung else 0
        elif staged:
            away = [at for at in on_host if quantised or not at.quantised]
            found += max(staged, sum(pools[STAGED[at]].kept_bytes for at in away))
        return here, found

    def _waiting_bytes(self, geometry: Geometry) -> tuple[int, int]:
        """Signals of the prompt that wait on the device until they are taken to the host.

        And those of its last block, but for queries, which are there as attention reads them.
        """
        g, prompt, policy = geometry, self.prompt, self.policy
        reads, of_heads = policy.reads(), list[int]()
        for use in row_uses(policy):
            if use.of_heads or (use.grouping == "head" and use.keeps in ("rows", "queries")):
                of_heads.append(min(prompt, use.prompt))
        vector, block = 2 * g.layers * g.head_dim, min(prompt, self.block)
        # A pass leaves those of its whole block, of which the last ones are taken.
        taken = max(block, *of_heads) if of_heads else 0
        reduced = read_as_norms(policy)
        whole, layers = reads & {Signal.KEYS, Signal.VALUES} - reduced, reads & frozenset(PER_LAYER)
        of_token = g.kv_heads * (vector * len(whole) + 8 * g.layers * len(reduced))
        of_token += 2 * g.layers * len(layers) + 2 * SKETCH_SIZE * (Signal.KEY_SKETCH in reads)
        of_token += 2 * g.hidden * len(hidden_layers(policy, g.layers))
        total = taken * g.heads * vector + prompt * of_token
        of_block = min(block, taken) * g.heads * vector + block * of_token
        return min(total, MAX_PENDING_BYTES + of_block), block * of_token
