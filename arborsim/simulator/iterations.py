"""What decode iterations read, and how long they take in each recall mode.

Tokens in DDR take part in attention; the *recall mode* says how.

- ``stage``: they were copied into staging buffers in HBM before, and are read from there.
- ``stream``: they cross PCIe in every iteration, layer by layer, through a double buffer.
- ``near``: the CPU attends to them where they are and its partial results are merged exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arborsim.hardware.cost import CostModel, Reads
from arborsim.memory.tiers import Tier
from arborsim.simulator.paths import PathProfile

RECALLS = ("stage", "stream", "near")

_QUANTISED = np.array([tier.quantised for tier in Tier])
_IN_DDR = np.array([tier.in_ddr for tier in Tier])


@dataclass(frozen=True)
class IterationCosts:
    """Costs of each iteration of a run; arrays ``[steps]``.

    Attributes
    ----------
    decode_s, exposed_s, policy_s : array
        Their sum is what the iteration takes.
    side_s : array
        Streaming, or attention on the CPU, whether the GPU waits for it or not.
    staging_bytes : int64 array
        Streaming buffers.
    to_ddr_bytes, from_ddr_bytes : int64 array
        Traffic of streaming or of near-memory attention.
    """

    decode_s: np.ndarray
    exposed_s: np.ndarray
    policy_s: np.ndarray
    side_s: np.ndarray
    staging_bytes: np.ndarray
    to_ddr_bytes: np.ndarray
    from_ddr_bytes: np.ndarray

    @property
    def total_s(self) -> np.ndarray:
        return np.asarray(self.decode_s + self.exposed_s + self.policy_s)


@dataclass(frozen=True)
class IterationModel:
    """Prices decode iterations.

    Attributes
    ----------
    cost : CostModel
    bytes_by_tier : int64 ``[tiers]``
        Of one token in one cache group.
    groups : int
    recall : {"stage", "stream", "near"}
    fused : bool
        Whether attention runs without writing out probabilities.
    tree_attention : bool
        Whether a batch reads a shared token once, or once per branch.
    """

    cost: CostModel
    bytes_by_tier: np.ndarray
    groups: int
    recall: str
    fused: bool
    tree_attention: bool

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
        policy_s = np.where(decided, self.cost.decision_s(path.length), 0.0)
        if not self.fused:
            policy_s = policy_s + self.cost.eager_rows_s(self._attended(path))
        if self.recall == "stage":
            decode_s = self.cost.decode(self._reads(path, sequences)).total_s
            zero, none = np.zeros(len(decode_s)), np.zeros(len(decode_s), dtype=np.int64)
            return IterationCosts(decode_s, zero, policy_s, zero, none, none, none)
        away = path.minus(landing).of_tiers(_IN_DDR)
        if self.recall == "stream":
            return self._streaming(path, away, sequences, policy_s)
        return self._near(path.minus(away), away, sequences, policy_s)

    def _attended(self, path: PathProfile) -> np.ndarray:
        """Readable tokens, summed over the branches."""
        return np.asarray(path.branches[: Tier.EVICTED].sum(axis=0) / self.groups)

    def _read(self, path: PathProfile) -> np.ndarray:
        """Tokens read in attention; int64 ``[tiers, steps]``."""
        return path.shared if self.tree_attention else path.branches

    def _reads(self, path: PathProfile, sequences: int) -> Reads:
        count = self._read(path)
        return Reads(
            sequences,
            attended_tokens=self._attended(path),
            bytes=self.bytes_by_tier @ count,
            quantised_bytes=self.bytes_by_tier[_QUANTISED] @ count[_QUANTISED],
        )

    def _streaming(
        self, path: PathProfile, away: PathProfile, sequences: int, policy_s: np.ndarray
    ) -> IterationCosts:
        """Tokens of `away` cross PCIe once per iteration; the GPU reads them from the buffer."""
        decode_s = self.cost.decode(self._reads(path, sequences)).total_s
        fetched_bytes = self.bytes_by_tier @ away.shared
        side = self.cost.stream(decode_s, fetched_bytes)
        buffers = np.asarray(self.cost.double_buffer_bytes(fetched_bytes))
        none = np.zeros_like(fetched_bytes)
        return IterationCosts(
            decode_s, side.exposed_s, policy_s, side.total_s, buffers, none, fetched_bytes
        )

    def _near(
        self, local: PathProfile, away: PathProfile, sequences: int, policy_s: np.ndarray
    ) -> IterationCosts:
        """The GPU attends to `local`, the CPU to `away`."""
        decode = self.cost.decode(self._reads(local, sequences))
        remote_bytes = self.bytes_by_tier @ self._read(away)
        side = self.cost.near(decode.attention_s, remote_bytes, sequences)
        queries, partials = (
            np.where(remote_bytes > 0, self.cost.geometry.layers * size, 0)
            for size in self.cost.near_message_bytes(sequences)
        )
        none = np.zeros_like(remote_bytes)
        return IterationCosts(
            decode.total_s, side.exposed_s, policy_s, side.total_s, none, queries, partials
        )
