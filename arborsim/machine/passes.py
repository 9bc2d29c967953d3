"""The time of passes over tokens on one machine: the numbers that a price's terms are made of.

A pass is priced by a profile's roofline (`arborsim.machine.cost`), or by measured kernels with the
constants of an engine (`arborsim.machine.forward`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arborsim.machine.cost import CostModel
from arborsim.machine.engine import EngineProfile
from arborsim.machine.forward import REDUCES, Forward, forward_of
from arborsim.machine.grid import LAUNCH_S
from arborsim.machine.integration import NO_LONGER, Longer
from arborsim.machine.machine import ServingOptions
from arborsim.machine.operations import Built, build
from arborsim.machine.program import DemandInfo


class Passes:
    """Seconds of passes on the GPUs that share a model; `cost` is of one of them."""

    step_s: float
    sequence_s: float

    def __init__(self, cost: CostModel, options: ServingOptions) -> None:
        self.cost = cost
        self.gpus = options.tensor_parallel
        self._busy_s: dict[tuple[int, int], tuple[float, float]] = {}
        profile, geometry = cost.profile, cost.geometry
        self.overlap = float(profile.overlap)
        self._forward: Forward | None = None
        self.engine = profile.engine
        self.cache_passes = 0.0 if self.engine is None else self.engine.cache_passes
        #: What an iteration, and a pass over a prompt, take at least: launching their kernels
        self.launch_s = self.prompt_launch_s = 0.0
        if profile.kernels and self.engine is not None:
            self._forward = forward_of(
                profile, self.engine, geometry, self.gpus, options.expert_parallel
            )
            self.step_s, self.sequence_s = self.engine.step_s, self.engine.sequence_s
        else:
            self.step_s, self.sequence_s = profile.per_step_s, profile.per_sequence_s
        if self.engine is not None:
            self.launch_s, self.prompt_launch_s = (
                self._least_s(self.engine, graphs) for graphs in (self.engine.graphs, False)
            )
        #: All-reduces of a pass by the profile's links, and for each token in it
        self._reduce_s = self._reduce_token_s = 0.0
        if self.gpus > 1 and self._forward is None:
            row_bytes = geometry.hidden * geometry.weight_bytes_per_element
            latency_s, one_s = (profile.all_reduce_s(self.gpus, n) for n in (0.0, row_bytes))
            parts = latency_s, one_s - latency_s
            if self.engine is not None:
                parts = self.engine.reduced_s(parts[0], 0.0), self.engine.reduced_s(0.0, parts[1])
            self._reduce_s, self._reduce_token_s = (REDUCES * geometry.layers * s for s in parts)

    def _least_s(self, engine: EngineProfile, graphs: bool) -> float:
        """Seconds of launching a pass, and of all of a step that is the host's."""
        launch_s = engine.pass_launch_s(self.cost.geometry.layers, graphs)
        return launch_s + self.step_s if launch_s else 0.0

    @property
    def forward(self) -> Forward:
        """The pass in measured kernels."""
        assert self._forward is not None, "a profile without measured kernels"
        return self._forward

    @property
    def measured(self) -> bool:
        """Whether passes are priced by measured kernels."""
        return self._forward is not None

    def products_busy_s(self, tokens: int, ends: int) -> tuple[float, float]:
        """Seconds of measured products' arithmetic, and of reading their weights, by themselves.

        The next token of `ends` sequences is computed.  Products that were measured to be faster
        than the shares of the peaks in the profile are busy for as long as they take.
        """
        if not self.measured or not tokens:
            return 0.0, 0.0
        found = self._busy_s.get((tokens, ends))
        if found is None:
            most_s = self.forward.products_s(tokens, ends) + self.forward.experts_s(tokens)
            compute_s = float(self.cost.flops_s(tokens, 0.0)) / self.gpus
            reading_s = float(self.cost.weights_read_s(tokens)) / self.gpus
            found = self._busy_s[tokens, ends] = min(compute_s, most_s), min(reading_s, most_s)
        return found

    def all_reduce_s(self, tokens: int, prefills: bool) -> float:
        """Adding up the activations of a pass over all GPUs, twice a layer."""
        if self._forward is not None:
            return self._forward.all_reduce_s(tokens, prefills)
        return self._reduce_s + tokens * self._reduce_token_s

    def attention_s(self, sequences: int, tokens: float) -> float:
        """Measured attention of a batch that reads `tokens` in a layer."""
        return self._forward.attention_s(sequences, tokens) if self._forward else 0.0

    def attention_knots(self, sequences: int) -> Sequence[float]:
        """Tokens between which that is linear."""
        return self._forward.attention(sequences)[0] if self._forward and sequences else ()

    def layers_s(self, tokens: int, sequences: int = 0, longer: Longer = NO_LONGER) -> float:
        """Overhead of all layers of a pass over `tokens`, of which `sequences` decode."""
        if self._forward is None:
            return self.cost.layers_s(tokens, longer)
        engine = self.forward.engine
        each_s = engine.prefill_layer_s if tokens > sequences else engine.layer_s
        each_s += self.cost.longer_layer_s(tokens, longer)
        return self.cost.geometry.layers * each_s

    def products_s(self, tokens: int, decoding: int, prompts: int = 0) -> float:
        """Matrix products of a pass over `tokens`, `decoding` of which decode."""
        whole_s = self.forward.products_s(tokens, decoding + prompts)
        return whole_s * self._sustained(tokens, decoding)

    def experts_s(self, tokens: int, decoding: int) -> float:
        """The routed experts of such a pass."""
        narrow = self.cost.geometry.expert_type == "mxfp4"
        own = self.forward.engine.mxfp4_prompt_share if narrow else 1.0
        return self.forward.experts_s(tokens) * self._sustained(tokens, decoding, own)

    def prompt_attention_s(self, tokens: int, present: int) -> float:
        """Attention of a prompt's `tokens`, with `present` ones before them."""
        return self.forward.prefill_attention_s(tokens, present) * self._sustained(tokens, 0)

    def _sustained(self, tokens: int, decoding: int, own: float = 1.0) -> float:
        """How much longer kernels take than alone, by the share of prompts' tokens in a pass."""
        share = self.forward.engine.prefill_share * own
        return 1.0 + (share - 1.0) * (tokens - decoding) / tokens if tokens else 1.0

    def operations(self, named: Mapping[str, Sequence[str]]) -> Built:
        """The seconds of a policy's operations: kernels are as short as any measured one."""
        profile, engine, kernel_s = self.cost.profile, self.engine, LAUNCH_S
        flops_per_s = profile.flops_per_s * profile.mfu
        if self._forward is not None:
            kernel_s, flops_per_s = self._forward.kernel_s, self._forward.product_flops_per_s
        if engine is not None and not engine.graphs:
            kernel_s = max(kernel_s, engine.launch_s)
        return build(named, profile, self.cost.geometry, self.gpus, kernel_s, flops_per_s)

    def policy_launch_s(self, longer: Longer) -> float:
        """Launching the kernels that policies add to each layer, by engines that launch each."""
        engine = self.engine
        if engine is None or engine.graphs or not engine.integrations:
            return 0.0
        return self.cost.geometry.layers * longer.one_s

    def added_launch_s(self, info: DemandInfo) -> float:
        """By how much launching takes longer with this search."""
        if not self.launch_s or self.engine is None:
            return 0.0
        layers = self.cost.geometry.layers
        return self.engine.launch_s * self.engine.added_launches(
            layers, info.parts, info.eager, info.recall, info.ddr_parts, info.groups
        )
