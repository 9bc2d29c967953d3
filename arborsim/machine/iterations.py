"""What decode iterations read, and how long they take in each recall mode.

Tokens in DDR take part in attention; the *recall mode* says how.

- ``stage``: they were copied into staging buffers in HBM before, and are read from there.
- ``stream``: they cross PCIe in every iteration, layer by layer, through a double buffer.
- ``near``: the CPU attends to them where they are and its partial results are merged exactly.
- ``ondemand``: the pages whose keys could matter most to a query are fetched, as in Quest (Tang et
  al. 2024, arXiv:2406.10774); the others are not read, which is an approximation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from arborsim.core.tiers import Tier
from arborsim.machine.cost import Array, CostModel, DecodeCost, Reads
from arborsim.machine.paths import PathProfile
from arborsim.machine.profile import PolicySeconds

RECALLS = ("stage", "stream", "near", "ondemand")
PAGE_TOKENS = 16  #: tokens that the bounds of ``ondemand`` speak of together, as live
PAGES_TOP = 16  #: pages that each KV head chooses in a step, as live

_QUANTISED = np.array([tier.quantised for tier in Tier])
_IN_DDR = np.array([tier.in_ddr for tier in Tier])
_READABLE = np.array([int(tier != Tier.EVICTED) for tier in Tier])


@dataclass(frozen=True)
class Beside:
    """Streaming, or attention on the CPU, in each iteration of a run; arrays ``[steps]``.

    Attributes
    ----------
    total_s, exposed_s : array
        What it takes, and the part that the GPU waits for.
    staging_bytes : int64 array
        Streaming buffers.
    to_ddr_bytes, from_ddr_bytes : int64 array
        Traffic.
    """

    total_s: np.ndarray
    exposed_s: np.ndarray
    staging_bytes: np.ndarray
    to_ddr_bytes: np.ndarray
    from_ddr_bytes: np.ndarray


@dataclass(frozen=True)
class IterationCosts:
    """Costs of each iteration of a run; arrays ``[steps]``.

    Attributes
    ----------
    decode_s, policy_s : array
    decode : DecodeCost
        What `decode_s` is the total of.
    beside : Beside or None
        What goes on beside the GPU's work, if anything.
    rows_s : array
        The part of `policy_s` that attention rows take.
    """

    decode_s: np.ndarray
    policy_s: np.ndarray
    decode: DecodeCost
    beside: Beside | None = None
    rows_s: Array = 0.0

    @property
    def total_s(self) -> np.ndarray:
        """What each iteration takes."""
        if self.beside is None:
            return np.asarray(self.decode_s + self.policy_s)
        return np.asarray(self.decode_s + self.beside.exposed_s + self.policy_s)


@dataclass(frozen=True)
class IterationModel:
    """Prices decode iterations.

    Attributes
    ----------
    cost : CostModel
    bytes_by_tier : int64 ``[tiers]``
        Of one token in one cache group.
    groups : int
    recall : {"stage", "stream", "near", "ondemand"}
    fused : bool
        Whether attention runs without writing out probabilities.
    tree_attention : bool
        Whether a batch reads a shared token once, or once per branch.
    policy : PolicySeconds
    """

    cost: CostModel
    bytes_by_tier: np.ndarray
    groups: int
    recall: str
    fused: bool
    tree_attention: bool
    policy: PolicySeconds

    def price(
        self, path: PathProfile, sequences: int, landing: PathProfile, decided: np.ndarray
    ) -> IterationCosts:
        """Costs of a run.

        Parameters
        ----------
        path : PathProfile
        sequences : int
            Leaves that decode together.
        landing : PathProfile
            The part of `path` that counts as being in DDR but is still read from its old place in
            HBM, because the copy has not finished.
        decided : bool ``[steps]``
            Whether the policy decides after the iteration.
        """
        policy_s = np.full(len(decided), self.policy.observing_s(sequences))
        if decided.any():
            policy_s += np.where(decided, self.policy.decision_s(path.length), 0.0)
        rows_s: Array = 0.0
        if not self.fused:
            rows_s = self.cost.eager_rows_s(self._attended(path))
            policy_s = policy_s + rows_s
        if self.recall == "stage":
            decode, beside = self._decode(path, sequences), None
        else:
            away = path.minus(landing).of_tiers(_IN_DDR)
            decode, beside = self._recalling(path, away, sequences)
        return IterationCosts(decode.total_s, policy_s, decode, beside, rows_s)

    def _recalling(
        self, path: PathProfile, away: PathProfile, sequences: int
    ) -> tuple[DecodeCost, Beside]:
        """Iterations in which the tokens of `away` are read from DDR."""
        if self.recall == "stream":
            return self._streaming(path, away, sequences)
        if self.recall == "near":
            return self._near(path.minus(away), away, sequences)
        return self._ondemand(path.minus(away), away, sequences)

    def _attended(self, path: PathProfile) -> np.ndarray:
        """Readable tokens, summed over the branches; the mean over the layers."""
        readable = (_READABLE @ path.branches) / self.groups
        if path.windows is None:
            return np.asarray(readable)
        return np.asarray(self.cost.mean_over_layers(readable, path.windows.branches))

    @cached_property
    def _quantised_sizes(self) -> np.ndarray:
        """Bytes of one token in one group; 0 in tiers of full precision."""
        return np.where(_QUANTISED, self.bytes_by_tier, 0)

    def _read(self, path: PathProfile) -> np.ndarray:
        """Tokens read in attention; int64 ``[tiers, steps]``."""
        return path.shared if self.tree_attention else path.branches

    def _window_bytes(self, path: PathProfile) -> np.ndarray | int:
        """Read in layers with a sliding window."""
        if path.windows is None:
            return 0
        tokens = path.windows.shared if self.tree_attention else path.windows.branches
        return np.asarray(self.cost.geometry.window_bytes_per_token * tokens)

    def _reads(self, path: PathProfile, sequences: int) -> Reads:
        count = self._read(path)
        read_bytes = self.bytes_by_tier @ count
        if path.windows is not None:
            read_bytes = read_bytes + self._window_bytes(path)
        return Reads(
            sequences,
            attended_tokens=self._attended(path),
            bytes=read_bytes,
            quantised_bytes=self._quantised_sizes @ count,
        )

    def _decode(self, path: PathProfile, sequences: int) -> DecodeCost:
        return self.cost.decode(self._reads(path, sequences), self.fused)

    def _streaming(
        self, path: PathProfile, away: PathProfile, sequences: int
    ) -> tuple[DecodeCost, Beside]:
        """Tokens of `away` cross PCIe once per iteration; the GPU reads them from the buffer."""
        decode = self._decode(path, sequences)
        fetched_bytes = self.bytes_by_tier @ away.shared
        side = self.cost.stream(decode.total_s, fetched_bytes)
        buffers = np.asarray(self.cost.double_buffer_bytes(fetched_bytes))
        none = np.zeros_like(fetched_bytes)
        return decode, Beside(side.total_s, side.exposed_s, buffers, none, fetched_bytes)

    def _ondemand(
        self, local: PathProfile, away: PathProfile, sequences: int
    ) -> tuple[DecodeCost, Beside]:
        """The pages of `away` with the largest bounds are fetched; the others are not read.

        Bounds are those of the live backend: the smallest and largest key of each page.  All
        sequences share a choice.  What is fetched has full precision.
        """
        cost = self.cost
        held = away.shared.sum(axis=0) / self.groups
        per_head, fetched = cost.ondemand_tokens(held, PAGE_TOKENS, PAGES_TOP)
        fetched_bytes = np.ceil(fetched * cost.geometry.full_bytes_per_token).astype(np.int64)
        # Attended to per head; at most what a path holds of it.
        attended = np.minimum(per_head, away.branches.sum(axis=0) / (self.groups * sequences))
        share = cost.geometry.full_layers / cost.geometry.layers
        beside_s = self._decode(local, sequences).attention_s
        beside_s = beside_s - cost.kv_read_s(self._window_bytes(local))
        bounds_bytes = cost.ondemand_bounds_bytes(held, PAGE_TOKENS)
        side = cost.ondemand(beside_s, fetched_bytes, bounds_bytes, sequences)
        queries, _ = cost.near_message_bytes(sequences)
        down = np.where(held > 0, cost.geometry.full_layers * queries, 0)
        buffers = -(-fetched_bytes // max(1, cost.geometry.full_layers))
        reads = self._reads(local, sequences)
        reads = replace(
            reads,
            attended_tokens=reads.attended_tokens + sequences * attended * share,
            bytes=reads.bytes + fetched_bytes,
        )
        decode = cost.decode(reads, self.fused)
        return decode, Beside(side.total_s, side.exposed_s, buffers, down, fetched_bytes)

    def _near(
        self, local: PathProfile, away: PathProfile, sequences: int
    ) -> tuple[DecodeCost, Beside]:
        """The GPU attends to `local`, the CPU to `away`."""
        decode = self._decode(local, sequences)
        # The CPU works beside the GPU in the layers that hold `away`: windows are in others.
        beside_s = decode.attention_s - self.cost.kv_read_s(self._window_bytes(local))
        remote_bytes = self.bytes_by_tier @ self._read(away)
        side = self.cost.near(beside_s, remote_bytes, sequences)
        queries, partials = (
            np.where(remote_bytes > 0, self.cost.geometry.full_layers * size, 0)
            for size in self.cost.near_message_bytes(sequences)
        )
        none = np.zeros_like(remote_bytes)
        return decode, Beside(side.total_s, side.exposed_s, none, queries, partials)
