"""What the cost model is asked about, and its answers term by term."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Array = np.ndarray | float


@dataclass(frozen=True)
class Reads:
    """What the attention of decode iterations reads; each a number or an array ``[steps]``.

    Attributes
    ----------
    sequences : int
        Tokens decoded per iteration.
    attended_tokens : array
        Tokens attended to, summed over the sequences; where layers differ, their mean.
    bytes : array
        Keys and values read: a shared node counts once with a tree-attention kernel, once per
        branch without.
    quantised_bytes : array
        The part of `bytes` that must be dequantised.
    """

    sequences: int
    attended_tokens: Array
    bytes: Array
    quantised_bytes: Array = 0.0


@dataclass(frozen=True)
class DecodeCost:
    """Seconds of decode iterations by term; arrays ``[steps]`` where the reads are.

    `overlap` is the profile's.
    """

    flops_s: Array
    weights_s: Array
    kv_s: Array
    dequantise_s: Array
    layers_s: float
    step_s: float
    overlap: float = 1.0

    @property
    def total_s(self) -> np.ndarray:
        bound = _bound(self.flops_s, self.weights_s + self.kv_s, self.overlap) + self.dequantise_s
        return np.asarray(bound + self.layers_s + self.step_s)

    @property
    def attention_s(self) -> np.ndarray:
        """The part spent on reading keys and values (what a CPU can work beside)."""
        return np.asarray(self.kv_s + self.dequantise_s)


@dataclass(frozen=True)
class PrefillCost:
    """Seconds of a prefill by term; `overlap` is the profile's."""

    matrices_s: float
    attention_s: float
    memory_s: float
    overhead_s: float
    overlap: float = 1.0

    @property
    def total_s(self) -> float:
        compute_s = self.matrices_s + self.attention_s
        return float(_bound(compute_s, self.memory_s, self.overlap)) + self.overhead_s


def _bound(compute_s: Array, memory_s: Array, overlap: float) -> np.ndarray:
    """The longer of the two, and what the longer does not hide of the shorter."""
    shown_s = (1.0 - overlap) * np.minimum(compute_s, memory_s)
    return np.asarray(np.maximum(compute_s, memory_s) + shown_s)


@dataclass(frozen=True)
class SideCost:
    """Work beside the GPU's in decode iterations: streaming over PCIe or attention on the CPU.

    Attributes
    ----------
    total_s : array ``[steps]``
        What the work takes.
    exposed_s : array ``[steps]``
        The part of it that the GPU waits for.
    """

    total_s: np.ndarray
    exposed_s: np.ndarray
