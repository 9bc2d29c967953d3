"""Speed of the live cache: against transformers' own, and what policies and copies cost.

    python benchmarks/live.py --out reports/benchmarks/live.json
    python benchmarks/live.py --targets --out reports/benchmarks/live_targets.json

Figures are ratios within one run.  The yardstick is transformers' `DynamicCache` with its SDPA
attention; steps of both alternate, so that a noisy machine is as noisy for either.

`--targets` is about what a smaller cache gains: a grouped-query model whose step is dominated by
its cache of `--context` tokens, under `--policies` at a `--budget` of them.  Each policy's search
computes the whole prompt, cuts it, and then decodes in turns with the others; seconds are those of
the processor, on one thread.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import copy
import json
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from scipy import stats
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from arborsim.core.formats import Format
from arborsim.policies.base import CacheView, Policy
from arborsim.policies.methods.arkv import ARKV
from arborsim.policies.registry import build
from arborsim.search import make_search
from arborsim_torch.batches import run_batched
from arborsim_torch.cache.layout import Place
from arborsim_torch.decoder import TreeDecoder, run_together
from arborsim_torch.hardware.facts import all_facts
from arborsim_torch.kernels.fused import pinned
from arborsim_torch.live.policy_search import CacheOptions, PolicySearch, SearchSetup
from arborsim_torch.sources import RandomSource

#: Name, layers, width, heads, KV heads, MLP: a tiny model is all overhead, a larger one is not.
SHAPES = {
    "tiny (6 x 128)": (6, 128, 4, 2, 256),
    "small (12 x 768)": (12, 768, 12, 4, 2048),
}
POLICIES: dict[str, dict[str, str]] = {
    "full": {},
    "streaming-llm": {},
    "epikv": {"recent": "32"},
    "h2o": {},
    "hierarchy": {"recent": "32", "interval": "32"},
    "arkv": {},
}
VOCABULARY = 1000
_TOP = 256  # positions kept per attention row, as in live runs over paths of this length

#: Of `--targets`: name, layers, width, heads, KV heads, MLP.  16,384 cached tokens take 604 MB and
#: the weights 314 MB, so that a quarter of the cache can be at most 1.97 times as fast by bytes.
TARGET_SHAPE = (12, 768, 12, 6, 2048)
#: Tokens per second at the budget, as a multiple of full retention's.
TARGETS = {"streaming-llm": 1.8, "epikv": 1.8, "h2o": 1.4, "arkv-int8": 1.2}
_EVICTABLE = {"pin_prompt": "false"}  # the cache is all prompt: nothing could be cut otherwise
TARGET_POLICIES: dict[str, dict[str, str]] = {
    "full": {},
    "streaming-llm": {},
    "epikv": _EVICTABLE,
    "h2o": {},
    "arkv": {},
    "arkv-int8": {},
    "hierarchy": _EVICTABLE,
}
_THEIRS = "DynamicCache"


@dataclass
class Speed:
    """Tokens per second of both caches, medians over steps that alternate."""

    model: str
    context_tokens: int
    ours_tokens_per_s: float
    theirs_tokens_per_s: float
    ratio: float


@dataclass
class Share:
    """Where the time of one search under a policy goes, as shares of its wall time."""

    model: str
    policy: str
    tokens_per_s: float
    policy_share: float
    exposed_share: float
    hidden_share: float
    peak_tokens: int


def make_model(shape: tuple[int, ...]) -> Any:
    layers, width, heads, kv_heads, inner = shape
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=inner,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        max_position_embeddings=1 << 16,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def against_dynamic_cache(name: str, model: Any, context: int, steps: int) -> Speed:
    """Decode with both caches in turns."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("sdpa")
    prompt = torch.randint(0, VOCABULARY, (1, context))
    decoder = TreeDecoder(model)
    decoder.prefill(prompt[0].tolist())
    decoder.open(1, 0)
    decoder.activate([1])
    theirs = DynamicCache(config=twin.config)
    with torch.inference_mode(), pinned(twin.device):
        twin(prompt, past_key_values=theirs)
        ours_s, theirs_s = [], []
        for _ in range(steps):
            begun = time.perf_counter()
            decoder.step([5])
            between = time.perf_counter()
            twin(torch.tensor([[5]]), past_key_values=theirs)
            ours_s.append(between - begun)
            theirs_s.append(time.perf_counter() - between)
    ours, other = 1 / median(ours_s), 1 / median(theirs_s)
    return Speed(name, context, round(ours, 1), round(other, 1), round(ours / other, 3))


def shares(name: str, model: Any, prompt: int, tokens: int) -> list[Share]:
    """One search per policy at half of the tokens."""
    source = RandomSource(VOCABULARY, prompt, tokens, tokens)
    setup = SearchSetup(model, source, lambda: make_search("linear"), 0.0, 0, tokens)
    found = []
    for policy, settings in POLICIES.items():
        one = PolicySearch(
            setup, source.problem(0), build(policy, settings), max(prompt + 64, tokens // 2),
            CacheOptions(),
        )  # fmt: skip
        outcomes: list[Any] = []
        begun = time.perf_counter()
        run_batched([one], 1, lambda search, ended, to=outcomes: to.append(search.outcome(ended)))
        wall_s = time.perf_counter() - begun
        m = outcomes[0].measured
        share = Share(
            model=name,
            policy=policy,
            tokens_per_s=round(m.generated_tokens / wall_s, 1),
            policy_share=round(m.time.policy_s / wall_s, 4),
            exposed_share=round(m.time.exposed_transfer_s / wall_s, 4),
            hidden_share=round(m.time.hidden_transfer_s / wall_s, 4),
            peak_tokens=m.peak_hbm_kv_tokens,
        )
        found.append(share)
    return found


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
        self._model = copy.deepcopy(model)
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
    new = warm + turns * turn + 2
    arms: dict[str, Any] = {}
    for name, policy in policies.items():
        arms[name] = Arm(model, policy, context, new, budget)
        print(f"{name}: prompt of {context} tokens in {arms[name].prefill_s:.0f} s", flush=True)
    arms[_THEIRS] = Theirs(model, arms["full"])
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
    low, high = _interval(ratios)
    total_s, wall_s = turn * sum(spent.process_s), turn * sum(spent.wall_s)
    gain = Gain(
        name, turn * len(ratios), len(ratios), round(turn * len(ratios) / total_s, 2),
        round(float(ratios.mean()), 3), round(low, 3), round(high, 3),
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


def _interval(values: np.ndarray) -> tuple[float, float]:
    """95%, of the mean."""
    if len(values) < 2:
        return float("nan"), float("nan")
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return float(values.mean() - half), float(values.mean() + half)


def against_full(options: argparse.Namespace) -> None:
    """`--targets`: print, and write where `--out` says."""
    names = ["full", *(name for name in options.policies.split(",") if name != "full")]
    policies = {
        name: Int8ARKV() if name == "arkv-int8" else build(name, TARGET_POLICIES.get(name, {}))
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
        record = {**_made_with(), **about, "gains": [asdict(gain) for gain in found]}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


def _made_with() -> dict[str, str]:
    return {
        "date": time.strftime("%Y-%m-%d"), "machine": platform.processor() or "cpu",
        **all_facts(make_model(SHAPES["tiny (6 x 128)"])),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="a smoke test, not a measurement")
    parser.add_argument("--targets", action="store_true", help="a smaller cache against full")
    parser.add_argument("--policies", default=",".join(TARGET_POLICIES), help="of --targets")
    parser.add_argument("--context", type=int, default=16384, help="cached tokens (--targets)")
    parser.add_argument("--budget", type=float, default=0.25, help="share of them (--targets)")
    parser.add_argument("--turns", type=int, default=20, help="repeats (--targets)")
    parser.add_argument("--turn", type=int, default=16, help="tokens of a turn (--targets)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.targets:
        against_full(options)
        return
    steps, contexts = (10, (64,)) if options.quick else (200, (256, 1024, 4096))
    speeds, found = [], []
    for name, shape in SHAPES.items():
        model = make_model(shape)
        for context in contexts:
            speeds.append(against_dynamic_cache(name, model, context, steps))
            print(speeds[-1])
        for share in shares(name, model, 64, 64 if options.quick else 512):
            found.append(share)
            print(share)
    if options.out:
        record = {
            **_made_with(), "speeds": [asdict(s) for s in speeds],
            "shares": [asdict(s) for s in found],
        }  # fmt: skip
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
