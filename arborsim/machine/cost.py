"""The cost model: what a forward pass, a transfer or a decision takes, term by term.

Everything is a closed formula over a profile and a geometry, vectorised over decode iterations, so
that 32k iterations cost one pass over arrays.

A decode iteration is bound by compute or by memory, whichever takes longer (a roofline), plus
overheads::

    max(FLOPs / (peak mfu), weights / (bandwidth mbu) + KV read / (bandwidth kv_efficiency))
        + dequantising + layers per_layer + per_step + sequences per_sequence

Layers with a sliding window attend to, read and hold the newest tokens only; with latent attention
a token is read once for all heads, whose queries then meet the latent vectors themselves.  Of a
mixture of experts the weights count that the tokens of a pass are expected to use.

A profile may say that a part of the shorter of the two is not hidden (``overlap < 1``), and that
layers take longer where attention rows are read (``eager_per_layer``).
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.core.geometry import Geometry
from arborsim.core.row_uses import ALL_QUERIES
from arborsim.core.tiers import DDR
from arborsim.machine.integration import NO_LONGER, Longer
from arborsim.machine.live_memory import row_sums_bytes
from arborsim.machine.profile import Direction, HardwareProfile

Array = np.ndarray | float
_PROBABILITY_BYTES_DECODE = 4  # softmax rows are fp32 ...
_PROBABILITY_BYTES_PREFILL = 2  # ... and rounded to bf16 before they meet the values
_SUMMED_ROW_BYTES = 4  # rows averaged over heads are added up in fp32
_LOG_SUM_EXP_BYTES = 4


class PrefillCost(NamedTuple):
    """Seconds of a prefill by term, without overheads."""

    matrices_s: float
    attention_s: float
    memory_s: float


class CostModel:
    """Seconds and bytes of one model on one machine; `pinned`: host buffers are page-locked."""

    def __init__(
        self, profile: HardwareProfile, geometry: Geometry, *, pinned: bool = True
    ) -> None:
        self.profile = profile
        self.geometry = geometry
        self.pinned = pinned
        # What every iteration needs, computed once.
        g = geometry
        self._flops_per_token = 2.0 * g.active_parameters
        # Scores and weighted values of a (query, key) pair per layer: 4 L H d.
        self._flops_per_pair = float(g.layers * g.score_flops(True))
        self._prefill_flops_per_pair = float(g.layers * g.score_flops(False))
        self._weights_s = g.weight_bytes / (profile.hbm_bytes_per_s * profile.mbu)
        self._managed_layers = max(1, g.full_layers)  # tokens of the others cannot be moved

    @cached_property
    def _peak_flops_per_s(self) -> float:
        """The rate of matrix products with the model's weights; raises as `_peak_flops_per_s`."""
        return _peak_flops_per_s(self.profile, self.geometry) * self.profile.mfu

    # Forward passes.

    def decode_s(
        self,
        sequences: int,
        attended_tokens: Array,
        read_bytes: Array,
        quantised_bytes: Array = 0.0,
        fused: bool = True,
    ) -> np.ndarray:
        """Iterations in which each sequence decodes one token; arrays ``[steps]`` or numbers.

        `attended_tokens` are summed over the sequences.  Where layers differ, their mean.  In
        `read_bytes`, keys and values of a shared node count once with a tree-attention kernel, once
        per branch without.  `quantised_bytes` is what those of them that must be dequantised would
        take in 8 bits.  `fused` attention is one kernel.  What others write is `eager_rows_s`.
        """
        compute_s = self.flops_s(sequences, attended_tokens)
        memory_s = self.weights_read_s(sequences) + self.kv_read_s(read_bytes)
        bound_s = self._bound_s(compute_s, memory_s) + self.dequantise_s(quantised_bytes)
        step_s = self.profile.per_step_s + self.profile.per_sequence_s * sequences
        longer = Longer(*[0.0 if fused else self.profile.eager_per_layer_s] * 2)
        return np.asarray(bound_s + self.layers_s(sequences, longer) + step_s)

    def flops_s(self, sequences: Array, attended_tokens: Array) -> Array:
        """Matrix products of a token per sequence, and attention to tokens."""
        matrices_s = self._flops_per_token * sequences / self._peak_flops_per_s
        return matrices_s + self.attention_flops_s(attended_tokens)

    def attention_flops_s(self, attended_tokens: Array) -> Array:
        """Attention to tokens alone."""
        peak = self.profile.flops_per_s * self.profile.mfu
        return self._flops_per_pair * attended_tokens / peak

    def weights_read_s(self, tokens: Array) -> Array:
        """Reading the weights that a pass over n tokens uses."""
        if not self.geometry.experts:
            return self._weights_s
        p = self.profile
        read_bytes: Array = self.geometry.weight_bytes_read(tokens)
        return read_bytes / (p.hbm_bytes_per_s * p.mbu)

    def kv_read_s(self, read_bytes: Array) -> Array:
        """Attention kernels reading keys and values from HBM."""
        return read_bytes / (self.profile.hbm_bytes_per_s * self.profile.kv_read_efficiency)

    def dequantise_s(self, quantised_bytes: Array) -> Array:
        return quantised_bytes / self.profile.dequantise_bytes_per_s

    def layers_s(self, tokens: int, longer: Longer = NO_LONGER) -> float:
        """Overhead of the layers of a pass over as many tokens.

        Under a policy each takes as much longer.
        """
        each_s = self.profile.per_layer_s + self.longer_layer_s(tokens, longer)
        return self.geometry.layers * each_s

    def longer_layer_s(self, tokens: int, longer: Longer) -> float:
        """By how much a layer takes longer than for one token under full retention.

        Entries that are not in order are read under a mask, and so is whatever several tokens
        read, which is paid once; attention rows and formats are paid in either.
        """
        if tokens <= 1:
            return longer.one_s
        return max(longer.one_s, self.profile.wide_per_layer_s + longer.several_s)

    def eager_rows_s(self, attended_tokens: Array) -> Array:
        """Writing out and reading back the probability rows of decode iterations."""
        g = self.geometry
        each = self._row_bytes or 2 * _PROBABILITY_BYTES_DECODE
        return g.layers * g.heads * each * attended_tokens / self.profile.eager_bytes_per_s

    def repeated_kv_s(self, read_bytes: Array, fused: bool) -> Array:
        """Copying KV heads to all query heads of their group, and reading the copies."""
        engine, g = self.profile.engine, self.geometry
        if fused or engine is None or not engine.repeats_kv_heads or g.latent_dim:
            return 0.0 * read_bytes
        copies = g.heads // g.kv_heads
        return 2 * copies * self.copy_s(read_bytes)

    @property
    def _row_bytes(self) -> float:
        """Bytes written and read per probability by the engine's attention; 0 if it is unknown."""
        engine = self.profile.engine
        return engine.row_bytes if engine is not None else 0.0

    def prefill(self, new_tokens: int, present_tokens: float = 0.0) -> PrefillCost:
        """`new_tokens` in one pass, attending to `present_tokens` before them and to each other.

        This is also what rehydrating an evicted span costs: its ancestors are present.
        """
        p, g = self.profile, self.geometry
        pairs = new_tokens * present_tokens + new_tokens * (new_tokens + 1) / 2
        windowed = _pairs_in_window(new_tokens, present_tokens, g.window)
        attention = float(self._prefill_flops_per_pair * self.mean_over_layers(pairs, windowed))
        peak = p.flops_per_s * p.mfu
        kv_bytes = (new_tokens + present_tokens) * g.full_bytes_per_token
        kv_bytes += (new_tokens + g.windowed(present_tokens)) * g.window_bytes_per_token
        return PrefillCost(
            matrices_s=self._flops_per_token * new_tokens / self._peak_flops_per_s,
            attention_s=attention / peak,
            memory_s=float(self.weights_read_s(new_tokens) + self.kv_read_s(kv_bytes)),
        )

    def prefill_s(self, new_tokens: int, present_tokens: float = 0.0) -> float:
        """As `prefill`, in all and with the overheads of a pass."""
        cost, p = self.prefill(new_tokens, present_tokens), self.profile
        overhead_s = self.layers_s(new_tokens) + p.per_step_s + p.per_sequence_s
        return float(self._bound_s(cost.matrices_s + cost.attention_s, cost.memory_s)) + overhead_s

    @property
    def tiles_rows(self) -> bool:
        """Whether the engine adds up a prompt's attention rows tile by tile, unlike eager ones."""
        engine = self.profile.engine
        return engine is not None and engine.tiled_rows

    def prompt_block(self, tokens: int) -> int:
        """How many of a prompt's tokens the live backend computes together; of others, all."""
        engine = self.profile.engine
        block = engine.chunk_tokens if engine is not None and engine.tiled_rows else 0
        return min(tokens, block) if block else tokens

    def prompt_rows_s(
        self, tokens: int, present: int = 0, queries: int = ALL_QUERIES, groups: int = 1
    ) -> float:
        """Seconds that reading a prompt's attention rows adds to fused attention.

        Eager engines write the ``H n n`` probabilities of every layer out and read them back,
        whatever is wanted of them.  One with `tiles_rows` makes the weights of the last `queries`
        again, as products of these and the keys; it reads and writes their mean over heads once a
        layer, in fp32, unless rows are added up by cache group.
        """
        g, p = self.geometry, self.profile
        keys = tokens + present
        if not self.tiles_rows:
            each = self._row_bytes or 2 * _PROBABILITY_BYTES_PREFILL
            return g.layers * g.heads * tokens * keys * each / p.eager_bytes_per_s
        queries = min(queries, tokens)
        everywhere = queries * keys - queries * (queries - 1) / 2
        windowed = _pairs_in_window(queries, keys - queries, g.window)
        pairs = float(self.mean_over_layers(everywhere, windowed))
        flops = 2.0 * g.layers * g.heads * g.head_dim * pairs
        written = 0.0 if groups > 1 else 2.0 * _SUMMED_ROW_BYTES * g.layers * pairs
        return flops / (p.flops_per_s * p.mfu) + written / p.eager_bytes_per_s

    def prompt_rows_bytes(
        self, tokens: int, present: int = 0, queries: int = ALL_QUERIES, groups: int = 1
    ) -> int:
        """HBM for these rows: ``H n n 2`` bytes for a layer at a time, or those of a block."""
        keys = tokens + present
        if not self.tiles_rows:
            return self.geometry.heads * tokens * keys * _PROBABILITY_BYTES_PREFILL
        return max(row_sums_bytes(min(queries, self.prompt_block(tokens)), groups)) * keys

    def workspace_bytes(self, new_tokens: int, sequences: int = 1) -> int:
        """Activations of one layer for tokens computed together, and the logits of the last ones.

        Counts the residual stream twice, queries, keys, values and attention output, and gate, up
        and product of the MLP, at the width of the weights; logits in fp32.
        """
        g = self.geometry
        widths = 2 * g.hidden + 2 * (g.heads + g.kv_heads) * g.head_dim + 3 * g.intermediate
        return new_tokens * widths * g.weight_bytes_per_element + sequences * g.vocab * 4

    def mean_over_layers(self, everywhere: Array, windowed: Array) -> Array:
        """The mean of a count that is `everywhere`, but `windowed` in layers with a window.

        It is 0 in layers that keep no tokens.
        """
        g = self.geometry
        if not g.window_layers and not g.cacheless_layers:
            return everywhere
        return (g.full_layers * everywhere + g.window_layers * windowed) / g.layers

    def _bound_s(self, compute_s: Array, memory_s: Array) -> Array:
        """The longer of the two, and what the longer does not hide of the shorter."""
        shown_s = (1.0 - self.profile.overlap) * np.minimum(compute_s, memory_s)
        return np.maximum(compute_s, memory_s) + shown_s

    def states_s(self, sequences: Array) -> Array:
        """Reading and writing the recurrent states of as many sequences."""
        return self.copy_s(2.0 * self.geometry.state_bytes * sequences)

    # Copies, and work next to the GPU's.

    def copy_s(self, moved_bytes: Array) -> Array:
        """Device code that reads or writes bytes of HBM (quantising, compaction)."""
        return moved_bytes / (self.profile.hbm_bytes_per_s * self.profile.mbu)

    def transfer_s(self, size_bytes: Array, block_bytes: Array, direction: Direction) -> np.ndarray:
        """One transfer of `size_bytes` in contiguous blocks of `block_bytes`; nothing takes 0 s."""
        speed = self.profile.link_bytes_per_s(block_bytes, direction, self.pinned)
        seconds = self.profile.pcie_latency_s + size_bytes / speed
        return np.where(np.asarray(size_bytes) > 0, seconds, 0.0)

    def stored_s(self, memory: int, size_bytes: float, direction: Direction) -> float:
        """A packed transfer to or from a memory (`Tier.memory`); below DDR, the slower link counts.

        Of the two these are its own link and PCIe.
        """
        block_bytes = self.packed_block_bytes(size_bytes)
        own_s = float(self.transfer_s(size_bytes, block_bytes, direction))
        if memory == DDR:
            return own_s
        below = self.profile.beside_hbm[memory]
        speed = float(below.bytes_per_s(block_bytes, direction))
        return max(own_s, below.latency_s + size_bytes / speed) if size_bytes else 0.0

    def packed_block_bytes(self, size_bytes: Array) -> Array:
        """Contiguous block when a gather kernel packs tokens by layer, keys and values apart."""
        return size_bytes / (self.geometry.tensors_per_layer * self._managed_layers)

    def stream_s(self, ddr_bytes: Array) -> np.ndarray:
        """Fetching `ddr_bytes` in an iteration, layer by layer, through a double buffer.

        While a layer is computed, the next one's tokens cross PCIe (the last layer fetches for the
        first one of the next iteration): the iteration takes the longer of the two.
        """
        layers = self._managed_layers
        block_bytes = self.packed_block_bytes(ddr_bytes)
        return layers * self.transfer_s(ddr_bytes / layers, block_bytes, "h2d")

    def double_buffer_bytes(self, ddr_bytes: Array) -> Array:
        """Two layers' share of the streamed bytes, rounded up."""
        return -(-2 * ddr_bytes // self._managed_layers)

    def near_s(self, ddr_bytes: Array, sequences: int) -> np.ndarray:
        """Attending to `ddr_bytes` on the CPU, while the GPU attends to its part of a layer.

        Per layer: queries cross to the host, the CPU reads its keys and values at the speed of the
        DDR, partial outputs and their log-sum-exp cross back, to be merged exactly.
        """
        layers = self._managed_layers
        queries, partials = self.near_message_bytes(sequences)
        messages_s = self.transfer_s(queries, queries, "d2h")
        messages_s = messages_s + self.transfer_s(partials, partials, "h2d")
        layer_s = ddr_bytes / (layers * self.profile.ddr_bytes_per_s) + messages_s
        return layers * np.where(np.asarray(ddr_bytes) > 0, layer_s, 0.0)

    def near_message_bytes(self, sequences: int) -> tuple[int, int]:
        """Bytes per layer of the queries going down, and of the partial results coming up."""
        g = self.geometry
        rows = sequences * g.heads
        queries = rows * g.query_dim * g.weight_bytes_per_element
        return queries, rows * (g.output_dim * 4 + _LOG_SUM_EXP_BYTES)

    def page_choice_s(self, bounds_bytes: Array) -> np.ndarray:
        """Choosing pages of DDR, which nothing hides: the pass goes on when the host knows them.

        Per layer: the GPU reads the bounds of all pages, which are in its memory, and tells the
        host which pages to fetch.
        """
        layers = self._managed_layers
        told_s = layers * self.profile.pcie_latency_s  # a few numbers
        there = np.asarray(bounds_bytes) > 0
        return np.where(there, self.copy_s(np.asarray(bounds_bytes)) + told_s, 0.0)

    def ondemand_s(self, fetched_bytes: Array) -> np.ndarray:
        """Fetching the chosen pages, layer by layer, while the GPU attends to its own part."""
        return self.stream_s(fetched_bytes)

    def move_s(self, transfers: int, groups: int, size_bytes: int) -> float:
        """The host's own work on transfers: gathering, ordering, entering what has come.

        `groups` are the cache groups of each transfer, added up.
        """
        p = self.profile
        return p.move_s * transfers + p.move_group_s * groups + p.move_byte_s * size_bytes

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


def _peak_flops_per_s(profile: HardwareProfile, geometry: Geometry) -> float:
    """The peak of products with a model's weights; 4 bits in groups are widened to bf16."""
    kind = geometry.weights or geometry.expert_weights
    if kind not in ("fp8", "fp8_block", "nvfp4"):
        return profile.flops_per_s
    found = profile.fp4_flops_per_s if kind == "nvfp4" else profile.fp8_flops_per_s
    if not found:
        raise UsageError(
            f"{profile.name} has no {kind} matrix products: choose other --weights, or another GPU"
        )
    return found


def _pairs_in_window(new_tokens: int, present_tokens: float, window: int) -> float:
    """Pairs of queries and keys of a prefill where a query sees `window` keys, its own included."""
    growing = min(max(window - present_tokens, 0.0), float(new_tokens))  # queries that see all
    return growing * present_tokens + growing * (growing + 1) / 2 + (new_tokens - growing) * window
