"""What the live backend is measured against: the machine's own rates, and transformers' cache."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from arborsim_torch.hardware import kernels
from arborsim_torch.hardware.facts import conditions
from arborsim_torch.hardware.timing import Timer, aside, capture
from arborsim_torch.kernels.fused import pinned
from arborsim_torch.models import LoadedModel, geometry
from arborsim_torch.sources import RandomSource
from arborsim_torch.tiers.link import host_empty
from benchmarks.gpu.journal import Facts, peaks, synchronize
from benchmarks.gpu.plan import Load

MIB = 1 << 20


def memory_rate(rates: Mapping[int, float], device: torch.device) -> float:
    """The best of rates by size; on CUDA of those that no cache holds, or of the largest."""
    if device.type == "cpu":
        return max(rates.values())
    beyond = [rate for size, rate in rates.items() if size >= kernels.BEYOND_CACHE]
    return max(beyond, default=rates[max(rates)])


def measure_yardsticks(loaded: LoadedModel, tiny: bool) -> Facts:
    """Rates of the device's memory and of plain copies over the link, and what a step must read.

    A decode step reads all weights but the embeddings, of which it takes one row, and the keys and
    values that attention reads.
    """
    model = loaded.model
    timer = Timer(model.device, 2, 5, 0.1 if tiny else 0.4)
    quick = timer.device.type == "cpu"
    read, copied = kernels.read_rates(timer, quick), kernels.copy_rates(timer, quick)
    up, down = (_link_rate(timer, MIB if tiny else 256 * MIB, way) for way in ("up", "down"))
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    return {
        "read_bytes_per_s": memory_rate(read, model.device),
        "copy_bytes_per_s": memory_rate(copied, model.device),
        "pinned_up_bytes_per_s": up,
        "pinned_down_bytes_per_s": down,
        "step_weight_bytes": weight_bytes - (0 if tied else embedding.nbytes),
        "kv_bytes_per_token": geometry(loaded).kv_bytes_per_token,
        "layers": geometry(loaded).layers,
        "conditions": conditions(model.device),  # clocks are those under load
    }


def _link_rate(timer: Timer, size: int, way: str) -> float:
    """Bytes per second of one large copy between page-locked memory and the device."""
    there = torch.zeros(size, dtype=torch.uint8, device=timer.device)
    here = host_empty((size,), torch.uint8, timer.device.type == "cuda").zero_()
    source, target = (here, there) if way == "up" else (there, here)
    return size / timer.queued_seconds(lambda: target.copy_(source, non_blocking=True))


KINDS = ("DynamicCache", "StaticCache")


@torch.inference_mode()
def run_yardstick(loaded: LoadedModel, load: Load, kind: str = "DynamicCache") -> Facts:
    """The same prompt and as many tokens through transformers alone: one pass, then one by one.

    Of a `DynamicCache` the SDPA is pinned to the backend that the live cache uses.  A `StaticCache`
    is as long as all tokens; on CUDA its steps are a CUDA graph, and PyTorch chooses the backend.

    Raises
    ------
    ValueError
        `kind` is none of `KINDS`.
    """
    from transformers import DynamicCache, StaticCache

    if kind not in KINDS:
        raise ValueError(f"{kind} is no yardstick: use {' or '.join(KINDS)}")
    model, device = loaded.model, loaded.model.device
    if model.config._attn_implementation != "sdpa":
        model.set_attn_implementation("sdpa")
    source = RandomSource(model.config.vocab_size, *load.source_options)
    ids = torch.tensor([source.problem(0).prompt], device=device)
    static = kind == "StaticCache"
    cache: Any = (
        StaticCache(config=model.config, max_cache_len=ids.shape[1] + load.new_tokens)
        if static
        else DynamicCache(config=model.config)
    )
    first = max(2, load.new_tokens // 4)  # the steady part begins where that of searches does
    synchronize(device)
    began = time.perf_counter()
    with pinned(device):
        steps = _Steps(model, cache, ids, static and device.type == "cuda")
    marks = [time.perf_counter()]
    with nullcontext() if static else pinned(device):
        for number in range(load.new_tokens):
            steps.step(number)
            marks.append(time.perf_counter())
    kv_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    steady = load.new_tokens - first
    return {
        "step": steps.kind,
        "tokens": steps.seen,
        "search_s": marks[-1] - began,
        "prefill_s": marks[0] - began,
        "steady_tokens": steady,
        "steady_s": marks[-1] - marks[first],
        "tokens_per_s": steady / (marks[-1] - marks[first]),
        "step_s": (marks[-1] - marks[first]) / steady,
        "kv_bytes": kv_bytes,
        **peaks(device),
    }


class _Steps:
    """A prompt's pass, and greedy steps after it; the host looks at every token, as a search does.

    Attributes
    ----------
    kind : str
        How the last step was computed: "graph", or "eager" and why.
    seen : list of int
        The tokens.
    """

    def __init__(self, model: Any, cache: Any, ids: Tensor, graphs: bool) -> None:
        self._model, self._cache, self._graphs = model, cache, graphs
        self._graph: Any = None
        self.kind = "eager"
        self._token = self._next(ids)
        self.seen = [int(self._token)]

    def _next(self, tokens: Tensor) -> Tensor:
        found = self._model(
            tokens, past_key_values=self._cache, use_cache=True, logits_to_keep=1
        ).logits
        return found[:, -1].argmax(-1, keepdim=True)

    def _advance(self) -> None:
        self._token.copy_(self._next(self._token))

    def step(self, number: int) -> None:
        """One more token, the n-th after that of the prompt's pass."""
        if self._graphs and number == 1:
            self._capture()
        if self._graph is not None:
            self._graph.replay()
        elif self._graphs and number == 0:  # libraries get ready on the stream that captures
            with aside(self._token.device):
                self._advance()
        else:
            self._advance()
        self.seen.append(int(self._token))

    def _capture(self) -> None:
        """Let the next steps be one graph, which is what compiled steps gain most from.

        Eager steps if that fails; a capture computes nothing, so the cache is as it was.
        """
        self._graph, why = capture(self._advance, self._token.device)
        self.kind = f"eager: {why}" if self._graph is None else "graph"
