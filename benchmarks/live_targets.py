"""What a smaller cache gains on a CPU: tokens per second under policies against full retention.

    python benchmarks/live_targets.py --out reports/benchmarks/live_targets.json

A grouped-query model whose step is dominated by its cache of `--context` tokens, under `--policies`
at a `--budget` of them.  Each policy's search cuts the prompt and then decodes in turns with the
others, in one process and on one thread; seconds are those of the processor.

The prompt is computed once, by the search with full retention.  In the others' prefill a layer
makes its queries, keys and values, which the cache and the policy's signals take as always, and
what it adds to the hidden state is taken from the first (`SharedPrompt`): the same numbers, sooner.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

sys.path.insert(0, str(Path(__file__).parents[1]))

from arborsim.core.formats import Format
from arborsim.policies.base import CacheView, Policy
from arborsim.policies.methods.arkv import ARKV
from arborsim.policies.registry import build
from arborsim.searches import make_search
from arborsim_torch.attention import tree_attention
from arborsim_torch.cache.layout import Place
from arborsim_torch.decoder import run_together
from arborsim_torch.kernels.fused import pinned
from arborsim_torch.live.policy_search import PolicySearch
from arborsim_torch.live.setup import CacheOptions, SearchSetup
from arborsim_torch.sources import RandomSource
from benchmarks.gpu.intervals import mean_interval
from benchmarks.live import VOCABULARY, made_with, make_model

_TOP = 256  # positions kept per attention row, as in live runs over paths of this length

#: Layers, width, heads, KV heads, MLP.  16,384 cached tokens take 604 MB and
#: the weights 314 MB, so that a quarter of the cache can be at most 1.97 times as fast by bytes.
TARGET_SHAPE = (12, 768, 12, 6, 2048)
#: Tokens per second at the budget, as a multiple of full retention's.
TARGETS = {"streaming-llm": 1.8, "epikv": 1.8, "h2o per=shared": 1.4, "arkv-int8": 1.2}
_EVICTABLE = {"pin_prompt": "false"}  # the cache is all prompt: nothing could be cut otherwise
TARGET_POLICIES: dict[str, dict[str, str]] = {
    "full": {},
    "streaming-llm": {},
    "epikv": _EVICTABLE,
    "h2o per=shared": {"per": "shared"},
    "arkv": {},
    "arkv-int8": {},
    "hierarchy": _EVICTABLE,
}
_THEIRS = "DynamicCache"


@dataclass(frozen=True)
class Int8ARKV(ARKV):
    """ARKV with whole numbers of 8 bits, which take a quarter of what every layer keeps.

    Layers of random weights are all about as sensitive: ARKV's own rule would round next to none.
    """

    @property
    def formats(self) -> tuple[Format, ...]:
        return (Format(8, 64, scale_bytes=2),)

    def full_precision(self, view: CacheView) -> np.ndarray:
        keeps = self.slack * (view.budget_tokens - self.window)
        return np.full(len(view.tier), int(0.75 * keeps))


class SharedPrompt:
    """Prefills of one prompt by a model, of which only the first is computed whole.

    Keeps the output of every layer, ``[tokens, width]`` each.
    """

    def __init__(self, model: Any) -> None:
        self._outputs: list[list[Tensor]] = [[] for _ in model.model.layers]
        self._complete = False
        for number, layer in enumerate(model.model.layers):
            layer.forward = self._forward(number, layer, layer.forward)

    def begin(self) -> None:
        """What follows is another search's prompt."""
        self._complete = bool(self._outputs[0])

    def _forward(self, number: int, layer: Any, computed: Callable[..., Tensor]) -> Any:
        outputs = self._outputs[number]

        def forward(hidden_states: Tensor, **given: Any) -> Tensor:
            if hidden_states.shape[1] == 1:
                return computed(hidden_states, **given)
            if not self._complete:
                outputs.append(computed(hidden_states, **given))
                return outputs[-1]
            self._signals(layer, hidden_states, **given)
            block = int(given["position_ids"][0, 0]) // outputs[0].shape[1]
            return outputs[block]

        return forward

    @staticmethod
    def _signals(
        layer: Any, hidden: Tensor, *, position_embeddings: Any, past_key_values: Any, context: Any,
        **_: Any,
    ) -> None:  # fmt: skip
        """Store keys and values, and collect what the policy reads of the layer's attention."""
        own = layer.self_attn
        normalised = layer.input_layernorm(hidden)
        query, key, value = (
            part(normalised).unflatten(-1, (-1, own.head_dim)).transpose(1, 2)
            for part in (own.q_proj, own.k_proj, own.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        key, value = past_key_values.update(key, value, own.layer_idx)
        (state,) = context.passes
        if state.collect:
            tree_attention(own, query, key, value, None, own.scaling, context=context)
        elif own.layer_idx in state.query_layers:
            state.query_vectors[own.layer_idx] = query


class Arm:
    """A search that decodes step by step, its prompt computed and cut."""

    def __init__(self, model: Any, policy: Policy, context: int, new: int, budget: float) -> None:
        source = RandomSource(VOCABULARY, context, new, new)
        setup = SearchSetup(
            model, source, lambda: make_search("linear"), 0.0, 0, new, attention_top=_TOP,
            clock=time.thread_time,
        )  # fmt: skip
        room = context + new if policy.name == "full" else int(budget * context)
        begun = time.process_time()
        self.search = PolicySearch(setup, source.problem(0), policy, room, CacheOptions())
        self._steps = self.search.steps()
        self._tokens = next(self._steps)
        self.prefill_s = time.process_time() - begun

    def step(self) -> None:
        """One token."""
        logits = run_together([self.search.prepare(self._tokens)])
        self._tokens = self._steps.send(logits[0][:, 0])

    def close(self) -> None:
        """End the search before its end."""
        self._steps.close()


class Theirs:
    """transformers' cache with what a search with full retention has stored."""

    def __init__(self, model: Any, full: Arm) -> None:
        self._model = model
        self._model.set_attn_implementation("sdpa")
        self._cache = DynamicCache(config=self._model.config)
        pool = full.search.cache.pools[Place.HBM]
        stored = pool.read_tokens(np.arange(full.search.cache.num_tokens))
        for layer, (keys, values) in enumerate(stored):
            self._cache.update(keys[None].clone(), values[None].clone(), layer)

    @torch.inference_mode()
    def step(self) -> None:
        """One token."""
        with pinned(self._model.device):
            self._model(torch.tensor([[5]]), past_key_values=self._cache)


@dataclass
class Gain:
    """A policy's decoding against full retention's, over turns of the same run.

    `ratio` is tokens/s over those of full retention: mean over turns, with a 95% interval (Student)
    in `low` and `high`; `wall_ratio` is the same by the clock.  Shares are of the seconds of these
    steps.
    """

    policy: str
    steps: int
    turns: int
    tokens_per_s: float
    ratio: float
    low: float
    high: float
    wall_ratio: float
    target: float | None = None
    decisions: int = 0
    policy_share: float = 0.0
    exposed_share: float = 0.0
    held_tokens: int = 0
    quantised_share: float = 0.0
    kv_mb: float = 0.0
    allocated_mb: float = 0.0
    prefill_s: float = 0.0


@dataclass
class _Turns:
    """Seconds per token of each turn, and what the policy used in all of them."""

    process_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    policy_s: float = 0.0
    exposed_s: float = 0.0
    decisions: int = 0


def gains(
    policies: Mapping[str, Policy], context: int, budget: float, turns: int, turn: int, warm: int
) -> list[Gain]:
    """Decode `turns` times `turn` tokens under each policy, one turn after the other."""
    model = make_model(TARGET_SHAPE)
    twin = copy.deepcopy(model)
    prompt = SharedPrompt(model)
    new = warm + turns * turn + 2
    arms: dict[str, Any] = {}
    for name, policy in policies.items():
        prompt.begin()
        arms[name] = Arm(model, policy, context, new, budget)
        print(f"{name}: prompt of {context} tokens in {arms[name].prefill_s:.0f} s", flush=True)
    arms[_THEIRS] = Theirs(twin, arms["full"])
    spent = {name: _Turns() for name in arms}
    for number in range(-1, turns):
        for name, arm in arms.items():
            if number == 0 and isinstance(arm, Arm):
                _note_use(arm, spent[name], -1)
            count = warm if number < 0 else turn if isinstance(arm, Arm) else -(-turn // 4)
            begun, at = time.process_time(), time.perf_counter()
            for _ in range(count):
                arm.step()
            if number >= 0:
                spent[name].process_s.append((time.process_time() - begun) / count)
                spent[name].wall_s.append((time.perf_counter() - at) / count)
    found = []
    for name, arm in arms.items():
        if isinstance(arm, Arm):
            _note_use(arm, spent[name], 1)
        found.append(_gain(name, arm, spent[name], spent["full"], turn))
        if isinstance(arm, Arm):
            arm.close()
    return found


def _note_use(arm: Arm, spent: _Turns, sign: int) -> None:
    measured = arm.search.measurements()
    spent.policy_s += sign * measured.time.policy_s
    spent.exposed_s += sign * measured.time.exposed_transfer_s
    spent.decisions += sign * measured.decisions


def _gain(name: str, arm: Arm | Theirs, spent: _Turns, full: _Turns, turn: int) -> Gain:
    ratios = np.array(full.process_s) / np.array(spent.process_s)
    mean, low, high = mean_interval(ratios)
    total_s, wall_s = turn * sum(spent.process_s), turn * sum(spent.wall_s)
    gain = Gain(
        name, turn * len(ratios), len(ratios), round(turn * len(ratios) / total_s, 2),
        round(mean, 3), round(low, 3), round(high, 3),
        round(sum(full.wall_s) / sum(spent.wall_s), 3), TARGETS.get(name),
    )  # fmt: skip
    if isinstance(arm, Arm):
        cache = arm.search.cache
        place = cache.place.values
        read = place != Place.LOST
        quantised = np.array([each.quantised for each in Place])[place]
        gain.decisions = spent.decisions
        gain.policy_share = round(spent.policy_s / total_s, 4)
        gain.exposed_share = round(spent.exposed_s / wall_s, 4)
        gain.held_tokens = int(read.sum() / len(place))
        gain.quantised_share = round(float((quantised & read).sum() / read.sum()), 3)
        gain.kv_mb = round(cache.used_bytes(*(p for p in Place if p in cache.pools)) / 1e6, 1)
        gain.allocated_mb = round(
            sum(pool.capacity_bytes for pool in cache.pools.values()) / 1e6, 1
        )
        gain.prefill_s = round(arm.prefill_s, 1)
    return gain


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="a smoke test, not a measurement")
    parser.add_argument("--policies", default=",".join(TARGET_POLICIES))
    parser.add_argument("--context", type=int, default=16384, help="tokens of the prompt")
    parser.add_argument("--budget", type=float, default=0.25, help="share of them")
    parser.add_argument("--turns", type=int, default=20, help="repeats")
    parser.add_argument("--turn", type=int, default=16, help="tokens of a turn")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = ["full", *(name for name in options.policies.split(",") if name != "full")]
    policies = {
        name: Int8ARKV()
        if name == "arkv-int8"
        else build(name.split()[0], TARGET_POLICIES.get(name, {}))
        for name in names
    }
    context, turns = (1024, 2) if options.quick else (options.context, options.turns)
    found = gains(policies, context, options.budget, turns, options.turn, options.turn)
    for gain in found:
        print(gain)
    if options.out:
        layers, width, heads, kv_heads, inner = TARGET_SHAPE
        weights = sum(p.nbytes for p in make_model(TARGET_SHAPE).parameters())
        weight_mb = round(weights / 1e6, 1)
        about = {
            "layers": layers, "width": width, "heads": heads, "kv_heads": kv_heads, "mlp": inner,
            "context": context, "budget": options.budget, "weight_mb": weight_mb,
        }  # fmt: skip
        record = {**made_with(), **about, "gains": [asdict(gain) for gain in found]}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
