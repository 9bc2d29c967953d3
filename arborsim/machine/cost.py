"""The cost model: what a forward pass, a transfer or a decision takes, term by term.

Everything is a closed formula over a profile and a geometry, vectorised over decode iterations, so
that 32k iterations cost one pass over arrays.  Each result is a record of its terms: a report can
say *why* an iteration takes as long as it does.

A decode iteration is bound by compute or by memory, whichever takes longer (a roofline), plus
overheads::

    max(FLOPs / (peak mfu), weights / (bandwidth mbu) + KV read / (bandwidth kv_efficiency))
        + dequantising + layers per_layer + per_step + sequences per_sequence

Layers with a sliding window attend to, read and hold the newest tokens only; with latent attention
a token is read once for all heads, whose queries then meet the latent vectors themselves; of a
mixture of experts the weights count that the tokens of a pass are expected to use.

A profile may say that a part of the shorter of the two is not hidden (``overlap < 1``), and that
layers take longer where attention rows are read (``eager_per_layer``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arborsim.machine.profile import Direction, HardwareProfile
from arborsim.trace.schema import Geometry

Array = np.ndarray | float
SCALE_BYTES = 4  # fp32
_PROBABILITY_BYTES_DECODE = 4  # softmax rows are fp32 ...
_PROBABILITY_BYTES_PREFILL = 2  # ... and rounded to bf16 before they meet the values
_LOG_SUM_EXP_BYTES = 4


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
        """The part spent on reading keys and values (what can hide the work of a CPU)."""
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
    """Work next to the GPU's in decode iterations: streaming over PCIe or attention on the CPU.

    Attributes
    ----------
    total_s : array ``[steps]``
        What the work takes.
    exposed_s : array ``[steps]``
        The part of it that the GPU waits for.
    """

    total_s: np.ndarray
    exposed_s: np.ndarray


class CostModel:
    """Seconds and bytes of one model on one machine.

    Parameters
    ----------
    profile : HardwareProfile
    geometry : Geometry
    pinned : bool
        Whether host buffers are page-locked.
    """

    def __init__(
        self, profile: HardwareProfile, geometry: Geometry, *, pinned: bool = True
    ) -> None:
        self.profile = profile
        self.geometry = geometry
        self.pinned = pinned
        # What every iteration needs, computed once.
        g, layers = geometry, geometry.layers
        self._flops_per_token = 2.0 * g.active_parameters
        self._flops_per_pair = {
            absorbed: float(layers * g.score_flops(absorbed)) for absorbed in (True, False)
        }
        self._weights_s = g.weight_bytes / (profile.hbm_bytes_per_s * profile.mbu)

    @property
    def elements_per_token(self) -> int:
        """Numbers that the layers which keep every token hold of one."""
        return self.geometry.full_layers * self.geometry.elements_per_layer

    @property
    def scales_per_token(self) -> int:
        """Quantisation scales of a token in those layers: one per vector.

        That is one per KV head, for K and for V; with latent attention, one.
        """
        return self.geometry.full_layers * self.geometry.vectors_per_layer

    @property
    def _managed_layers(self) -> int:
        """Layers whose tokens can be moved; 1 if there is none and nothing is."""
        return max(1, self.geometry.full_layers)

    def decode(self, reads: Reads, fused: bool = True) -> DecodeCost:
        """Iterations in which each of ``reads.sequences`` sequences decodes one token.

        Without a fused kernel layers launch more; what they write is `eager_rows_s`.
        """
        p = self.profile
        return DecodeCost(
            flops_s=self.flops_s(reads.sequences, reads.attended_tokens),
            weights_s=self.weights_read_s(reads.sequences),
            kv_s=self.kv_read_s(reads.bytes),
            dequantise_s=self.dequantise_s(reads.quantised_bytes),
            layers_s=self.layers_s(fused),
            step_s=p.per_step_s + p.per_sequence_s * reads.sequences,
            overlap=p.overlap,
        )

    def flops_s(self, sequences: Array, attended_tokens: Array) -> Array:
        """Matrix products of a token per sequence, and attention to tokens."""
        matrices = self._flops_per_token * sequences
        attention = self._attention_flops(attended_tokens, absorbed=True)
        return (matrices + attention) / (self.profile.flops_per_s * self.profile.mfu)

    def dequantise_s(self, quantised_bytes: Array) -> Array:
        return quantised_bytes / self.profile.dequantise_bytes_per_s

    def layers_s(self, fused: bool = True) -> float:
        """Overhead of the layers of a pass."""
        p = self.profile
        return self.geometry.layers * (p.per_layer_s + (0.0 if fused else p.eager_per_layer_s))

    def prefill(self, new_tokens: int, present_tokens: float = 0.0) -> PrefillCost:
        """`new_tokens` in one pass, attending to `present_tokens` before them and to each other.

        This is also what rehydrating an evicted span costs: its ancestors are present.
        """
        p, g = self.profile, self.geometry
        pairs = new_tokens * present_tokens + new_tokens * (new_tokens + 1) / 2
        windowed = _pairs_in_window(new_tokens, present_tokens, g.window)
        mean = self.mean_over_layers(pairs, windowed)
        attention = float(self._attention_flops(mean, absorbed=False))
        peak = p.flops_per_s * p.mfu
        kv_bytes = (new_tokens + present_tokens) * g.full_bytes_per_token
        kv_bytes += (new_tokens + g.windowed(present_tokens)) * g.window_bytes_per_token
        return PrefillCost(
            matrices_s=self._flops_per_token * new_tokens / peak,
            attention_s=attention / peak,
            memory_s=float(self.weights_read_s(new_tokens) + self.kv_read_s(kv_bytes)),
            overhead_s=g.layers * p.per_layer_s + p.per_step_s + p.per_sequence_s,
            overlap=p.overlap,
        )

    def kv_read_s(self, read_bytes: Array) -> Array:
        """Attention kernels reading keys and values from HBM."""
        return read_bytes / (self.profile.hbm_bytes_per_s * self.profile.kv_read_efficiency)

    def mean_over_layers(self, everywhere: Array, windowed: Array) -> Array:
        """The mean of a count that is `everywhere`, but `windowed` in layers with a window."""
        g = self.geometry
        if not g.window_layers:
            return everywhere
        return (g.full_layers * everywhere + g.window_layers * windowed) / g.layers

    def _attention_flops(self, pairs: Array, absorbed: bool) -> Array:
        """Scores and weighted values of (query, key) pairs per layer: ``4 L H d`` each."""
        return self._flops_per_pair[absorbed] * pairs

    def weights_read_s(self, tokens: Array) -> Array:
        """Reading the weights that a pass over n tokens uses."""
        if not self.geometry.experts:
            return self._weights_s
        p = self.profile
        read_bytes: Array = self.geometry.weight_bytes_read(tokens)
        return read_bytes / (p.hbm_bytes_per_s * p.mbu)

    def eager_rows_s(self, attended_tokens: Array) -> Array:
        """Writing out and reading back the probability rows of decode iterations."""
        g = self.geometry
        row_bytes = g.layers * g.heads * _PROBABILITY_BYTES_DECODE * attended_tokens
        return 2 * row_bytes / self.profile.eager_bytes_per_s

    def eager_prefill_s(self, tokens: int) -> float:
        """Writing out and reading back the ``n x n`` probabilities of every layer and head."""
        matrices_bytes = self.geometry.layers * self.eager_prefill_bytes(tokens)
        return 2 * matrices_bytes / self.profile.eager_bytes_per_s

    def eager_prefill_bytes(self, tokens: int) -> int:
        """HBM for one layer's probabilities at a time: ``H n n 2`` bytes."""
        return self.geometry.heads * tokens * tokens * _PROBABILITY_BYTES_PREFILL

    def workspace_bytes(self, new_tokens: int, sequences: int = 1) -> int:
        """Activations of one layer for tokens computed together, and the logits of the last ones.

        Counts the residual stream twice, queries, keys, values and attention output, and gate, up
        and product of the MLP, at the width of the weights; logits in fp32.
        """
        g = self.geometry
        widths = 2 * g.hidden + 2 * (g.heads + g.kv_heads) * g.head_dim + 3 * g.intermediate
        return new_tokens * widths * g.weight_bytes_per_element + sequences * g.vocab * 4

    def copy_s(self, moved_bytes: Array) -> Array:
        """Device code that reads or writes bytes of HBM (quantising, compaction)."""
        return moved_bytes / (self.profile.hbm_bytes_per_s * self.profile.mbu)

    def transfer_s(self, size_bytes: Array, block_bytes: Array, direction: Direction) -> np.ndarray:
        """One transfer of `size_bytes` in contiguous blocks of `block_bytes`; nothing takes 0 s."""
        speed = self.profile.link_bytes_per_s(block_bytes, direction, self.pinned)
        seconds = self.profile.pcie_latency_s + size_bytes / speed
        return np.where(np.asarray(size_bytes) > 0, seconds, 0.0)

    def packed_block_bytes(self, size_bytes: Array) -> Array:
        """Contiguous block when a gather kernel packs tokens by layer, keys and values apart."""
        return size_bytes / (self.geometry.tensors_per_layer * self._managed_layers)

    def stream(self, compute_s: Array, ddr_bytes: Array) -> SideCost:
        """Fetch `ddr_bytes` every iteration, layer by layer, through a double buffer.

        While a layer is computed, the next one's tokens cross PCIe (the last layer fetches for the
        first one of the next iteration): each layer takes the longer of the two.
        """
        layers = self._managed_layers
        transfer_s = self.transfer_s(ddr_bytes / layers, self.packed_block_bytes(ddr_bytes), "h2d")
        exposed_s = np.maximum(0.0, transfer_s - compute_s / layers)
        return SideCost(layers * transfer_s, layers * exposed_s)

    def double_buffer_bytes(self, ddr_bytes: Array) -> Array:
        """Two layers' share of the streamed bytes, rounded up."""
        return -(-2 * ddr_bytes // self._managed_layers)

    def near(self, attention_s: Array, ddr_bytes: Array, sequences: int) -> SideCost:
        """Attend to `ddr_bytes` on the CPU while the GPU attends to its part of the same layer.

        Per layer: queries cross to the host, the CPU reads its keys and values at the speed of the
        DDR, partial outputs and their log-sum-exp cross back, to be merged exactly.
        """
        p, layers = self.profile, self._managed_layers
        queries, partials = self.near_message_bytes(sequences)
        messages_s = self.transfer_s(queries, queries, "d2h")
        messages_s = messages_s + self.transfer_s(partials, partials, "h2d")
        layer_s = ddr_bytes / (layers * p.ddr_bytes_per_s) + messages_s
        layer_s = np.where(np.asarray(ddr_bytes) > 0, layer_s, 0.0)
        exposed_s = np.maximum(0.0, layer_s - attention_s / layers)
        return SideCost(layers * layer_s, layers * exposed_s)

    def ondemand(
        self, attention_s: Array, fetched_bytes: Array, bounds_bytes: Array, sequences: int
    ) -> SideCost:
        """Choose pages on the CPU and fetch them while the GPU attends to its part of the layer.

        Per layer: queries cross to the host, the CPU reads the bounds of all its pages at the speed
        of the DDR, and the chosen pages cross back.
        """
        p, layers = self.profile, self._managed_layers
        queries, _ = self.near_message_bytes(sequences)
        block_bytes = self.packed_block_bytes(fetched_bytes)
        layer_s = self.transfer_s(queries, queries, "d2h")
        layer_s = layer_s + bounds_bytes / (layers * p.ddr_bytes_per_s)
        layer_s = layer_s + self.transfer_s(fetched_bytes / layers, block_bytes, "h2d")
        layer_s = np.where(np.asarray(fetched_bytes) > 0, layer_s, 0.0)
        exposed_s = np.maximum(0.0, layer_s - attention_s / layers)
        return SideCost(layers * layer_s, layers * exposed_s)

    def ondemand_tokens(
        self, held_tokens: np.ndarray, page_tokens: int, pages_top: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens that a KV head attends to, and tokens that are fetched for all heads, per layer.

        Each head chooses `pages_top` pages; what is fetched is the union.  Its size is the expected
        one of heads that choose independently and evenly (heads that agree fetch less).
        """
        pages = np.ceil(held_tokens / page_tokens)
        share = np.minimum(1.0, pages_top / np.maximum(pages, 1.0))
        heads = 1 if self.geometry.latent_dim else self.geometry.kv_heads
        return held_tokens * share, held_tokens * (1.0 - (1.0 - share) ** heads)

    def ondemand_bounds_bytes(self, held_tokens: np.ndarray, page_tokens: int) -> np.ndarray:
        """The smallest and the largest key of each page, in the layers that keep every token."""
        g = self.geometry
        key = g.elements_per_layer // g.tensors_per_layer * g.kv_bytes_per_element
        return np.ceil(held_tokens / page_tokens) * 2 * key * g.full_layers

    def near_message_bytes(self, sequences: int) -> tuple[int, int]:
        """Bytes per layer of the queries going down, and of the partial results coming up."""
        g = self.geometry
        rows = sequences * g.heads
        queries = rows * g.query_dim * g.weight_bytes_per_element
        return queries, rows * (g.output_dim * 4 + _LOG_SUM_EXP_BYTES)


def _pairs_in_window(new_tokens: int, present_tokens: float, window: int) -> float:
    """Pairs of queries and keys of a prefill where a query sees `window` keys, its own included."""
    growing = min(max(window - present_tokens, 0.0), float(new_tokens))  # queries that see all
    return growing * present_tokens + growing * (growing + 1) / 2 + (new_tokens - growing) * window
