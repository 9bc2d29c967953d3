"""What decode iterations read and move in each recall mode.

Tokens in DDR take part in attention; the *recall mode* says how.

- ``stage``: they were copied into staging buffers in HBM before, and are read from there.
- ``stream``: they cross PCIe in every iteration, layer by layer, through a double buffer.
- ``near``: the CPU attends to them where they are and its partial results are merged exactly.
- ``ondemand``: the pages whose keys could matter most to a query are fetched, as in Quest (Tang et
  al. 2024, arXiv:2406.10774); the others are not read, which is an approximation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from arborsim.core.tiers import Tier
from arborsim.machine.cost import Array, CostModel
from arborsim.machine.paths import PathProfile

PAGE_TOKENS = 16  #: tokens that the bounds of ``ondemand`` speak of together, as live
PAGES_TOP = 16  #: pages that each KV head chooses in a step, as live

_QUANTISED = np.array([tier.quantised for tier in Tier])
_IN_DDR = np.array([tier.in_ddr for tier in Tier])
_READABLE = np.array([int(tier != Tier.EVICTED) for tier in Tier])


@dataclass(frozen=True)
class Reading:
    """What each iteration of a run asks for; arrays ``[steps]`` or single numbers.

    Attributes
    ----------
    read_bytes, quantised_bytes : array
        Keys and values that the GPU reads: a shared node once with a tree-attention kernel, once
        per branch without; the part of them that must be dequantised.
    attended, rows : array
        Tokens attended to, summed over the sequences, and those of them whose probabilities are
        written out; where layers differ, their mean.
    streamed_bytes, remote_bytes : array
        Fetched from DDR, and read there by the CPU.
    window_bytes : array
        The part of `read_bytes` in layers with a sliding window, where the CPU works during the
        others; 0 where it does not.
    buffer_bytes : array or None
        HBM for what is fetched; None in modes that fetch nothing.
    """

    read_bytes: Array
    quantised_bytes: Array
    attended: Array
    rows: Array = 0.0
    streamed_bytes: Array = 0.0
    remote_bytes: Array = 0.0
    window_bytes: Array = 0.0
    buffer_bytes: np.ndarray | None = None


@dataclass(frozen=True)
class Recall:
    """Knows what iterations read.

    Attributes
    ----------
    cost : CostModel
    bytes_by_tier : int64 ``[tiers]``
        Of one token in one cache group.
    groups : int
    mode : {"stage", "stream", "near", "ondemand"}
    fused : bool
        Whether attention runs without writing out probabilities.
    tree_attention : bool
        Whether a batch reads a shared token once, or once per branch.
    """

    cost: CostModel
    bytes_by_tier: np.ndarray
    groups: int
    mode: str
    fused: bool
    tree_attention: bool

    @property
    def fetches(self) -> bool:
        """Whether iterations fetch tokens over PCIe."""
        return self.mode in ("stream", "ondemand")

    def reading(self, path: PathProfile, sequences: int, landing: PathProfile | None) -> Reading:
        """What a run of iterations asks for.

        Parameters
        ----------
        path : PathProfile
        sequences : int
            Leaves that decode together.
        landing : PathProfile or None
            The part of `path` that counts as being in DDR but is still read from its old place in
            HBM, because the copy has not finished.
        """
        rows: Array = 0.0 if self.fused else self._attended(path)
        if self.mode == "stage":
            return self._reading(path, rows)
        away = (path if landing is None else path.minus(landing)).of_tiers(_IN_DDR)
        if self.mode == "stream":
            return self._streaming(path, away, rows)
        if self.mode == "near":
            return self._near(path.minus(away), away, rows)
        return self._ondemand(path.minus(away), away, sequences, rows)

    def _reading(self, path: PathProfile, rows: Array, **more: Any) -> Reading:
        count = self._read(path)
        read_bytes = self.bytes_by_tier @ count + self._window_bytes(path)
        return Reading(
            read_bytes, self._quantised_sizes @ count, self._attended(path), rows, **more
        )

    def _streaming(self, path: PathProfile, away: PathProfile, rows: Array) -> Reading:
        """Tokens of `away` cross PCIe once per iteration; the GPU reads them from the buffer."""
        fetched_bytes = self.bytes_by_tier @ away.shared
        buffers = np.asarray(self.cost.double_buffer_bytes(fetched_bytes))
        return self._reading(path, rows, streamed_bytes=fetched_bytes, buffer_bytes=buffers)

    def _near(self, local: PathProfile, away: PathProfile, rows: Array) -> Reading:
        """The GPU attends to `local`, the CPU to `away`."""
        return self._reading(
            local, rows, remote_bytes=self.bytes_by_tier @ self._read(away),
            window_bytes=self._window_bytes(local),
        )  # fmt: skip

    def _ondemand(
        self, local: PathProfile, away: PathProfile, sequences: int, rows: Array
    ) -> Reading:
        """The pages of `away` with the largest bounds are fetched; the others are not read.

        Bounds are those of the live backend: the smallest and largest key of each page.  All
        sequences share a choice.  What is fetched has full precision.
        """
        cost, geometry = self.cost, self.cost.geometry
        held = away.shared.sum(axis=0) / self.groups
        per_head, fetched = cost.ondemand_tokens(held, PAGE_TOKENS, PAGES_TOP)
        fetched_bytes = np.ceil(fetched * geometry.full_bytes_per_token).astype(np.int64)
        # Attended to per head; at most what a path holds of it.
        attended = np.minimum(per_head, away.branches.sum(axis=0) / (self.groups * sequences))
        share = geometry.full_layers / geometry.layers
        count = self._read(local)
        window_bytes = self._window_bytes(local)
        return Reading(
            self.bytes_by_tier @ count + window_bytes + fetched_bytes,
            self._quantised_sizes @ count,
            self._attended(local) + sequences * attended * share,
            rows,
            fetched_bytes,
            cost.ondemand_bounds_bytes(held, PAGE_TOKENS),
            window_bytes,
            -(-fetched_bytes // max(1, geometry.full_layers)),
        )

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
