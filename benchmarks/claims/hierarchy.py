"""What the memory-hierarchy paper claims of destroyed shares, scores, bytes and seconds.

    python -m benchmarks.claims.hierarchy --out reports/claims

Right answers under Algorithm 1 come from masked searches of the reference model
(`benchmarks.claims.masked`; ``benchmarks/quality.py hierarchy`` has live ones), bytes and seconds
from replays of ``traces/chain-linear.parquet`` on the paper's GPUs and models.  The paper's window
of 128 tokens and interval of 64 belong to chains of 1,422 tokens, and are scaled to the 263 of the
reference model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from arborsim.core.tiers import Budget
from arborsim.machine.config import with_types
from arborsim.machine.lookup import load_geometry, load_profile
from arborsim.machine.machine import Machine, ServingOptions
from arborsim.machine.profile import HardwareProfile
from arborsim.machine.scheduler import ClosedLoop
from arborsim.machine.serving import ServingEngine
from arborsim.policies.registry import build
from arborsim.products.replay.run import Replay
from benchmarks.claims import Row, Store, run
from benchmarks.claims.masked import Rule, observe, search
from tests.helpers.demands import record_demands

TRACE = Path(__file__).parents[2] / "traces" / "chain-linear.parquet"
MODEL = "r1-distill-qwen-7b"
LINES = 32  # of a program; its 164 prompt tokens are protected
EPISODES, FEW = 50, 10  # problems, as many as the paper's; those with gradients
CHAIN, LONG, CAP = 1422, 3800, 2048  # tokens: mean of GSM8K, of MATH Level-5, most generated
WINDOW, INTERVAL = 24, 12  # 128 and 64 tokens of 1,422, of 263
WINDOWS, INTERVALS = (6, 12, 24, 47, 94), (3, 6, 12, 24, 47)  # Tables 15 and 16
RATIOS = (0.03, 0.5)  # of which equation 4's bound is tested
#: Bandwidths of Figure 6, from and to the GPU, of unpinned memory.
DOWN, UP = 22e9, 15e9


# Shares that Algorithm 1 destroys and keeps: counting, no model


def counted(
    tokens: int, ratio: float, beta: float, interval: int, total: bool, window: int = 128
) -> Iterator[dict[str, int]]:
    """Tokens by tier after each decision of Algorithm 1 (lines 17 to 27), without the prompt."""
    sinks, gone = 4, 0
    for step in range(interval, tokens + 1, interval):
        ever = max(0, step - sinks - window)
        candidates = max(0, ever - gone)
        wanted = int(ratio * ever) - gone if total else int(ratio * candidates)
        gone += max(0, min(wanted, candidates))
        in_hbm = int(beta * max(0, ever - gone))
        protected = min(step, sinks + window)
        yield {
            "step": step, "hbm": protected + in_hbm, "ddr": max(0, ever - gone) - in_hbm,
            "evicted": gone,
        }  # fmt: skip


def _shares(counts: dict[str, int]) -> Row:
    """With shares of the generated tokens."""
    step = counts["step"]
    return counts | {f"{tier}_share": counts[tier] / step for tier in ("hbm", "ddr", "evicted")}


def counting(store: Store) -> None:
    """How much is destroyed at the end, by what r is a share of."""
    cells = [(tokens, ratio, 64) for tokens in (CHAIN, LONG) for ratio in (0.03, 0.05, 0.1, 0.2)]
    cells += [(CHAIN, 0.05, interval) for interval in (16, 32, 128, 256)]
    for tokens, ratio, interval in cells:
        for total in (False, True):
            setting = {"tokens": tokens, "ratio": ratio, "interval": interval, "total": total}
            *_, last = counted(tokens, ratio, 0.5, interval, total)
            store.cell("counting", setting, partial(list, [_shares(last)]))
    for total in (False, True):
        rows = [_shares(each) for each in counted(LONG, 0.1, 0.5, 64, total)]
        store.cell("tiers", {"tokens": LONG, "ratio": 0.1, "total": total}, partial(list, rows))


# Right answers: masked searches of the reference model


def rules() -> Iterator[tuple[Rule, int]]:
    """What is searched, what decides most first, and on how many problems."""
    base = Rule(interval=INTERVAL, window=WINDOW)
    for ratio in (0.05, 0.1, 0.2, 0.03):
        yield from ((replace(base, ratio=ratio, total=total), EPISODES) for total in (False, True))
    for ratio in (0.3, 0.5):
        for score, episodes in (("attention", EPISODES), ("random", EPISODES), ("gradient", FEW)):
            yield replace(base, ratio=ratio, total=True, score=score), episodes
    yield replace(base, ratio=0.0), EPISODES
    for score in ("value", "attention - redundancy", "value - redundancy"):
        yield replace(base, score=score), EPISODES
    for total in (False, True):
        yield from ((replace(base, total=total, window=each), EPISODES) for each in WINDOWS)
        yield from ((replace(base, total=total, interval=each), EPISODES) for each in INTERVALS)


def answers(store: Store) -> None:
    """Tables 3, 12, 13, 15 and 16, Figures 2 to 4: what is destroyed, when, by which score."""
    import torch

    from arborsim_torch import reference

    torch.set_num_threads(1)
    model, task = reference.load("chain", lines=LINES)
    model.requires_grad_(False)
    problems = [task.problem("test", i) for i in range(EPISODES)]
    for rule, episodes in rules():
        make = partial(_masked, model, task, problems[:episodes], rule)
        store.cell("masked", asdict(rule), make)
    store.cell("scores", {"lines": LINES}, partial(_scores, model, task, problems[:FEW]))


def tail(store: Store) -> None:
    """The same on task `tail`, of which most tokens are read by nothing later."""
    import torch

    from arborsim_torch import reference

    torch.set_num_threads(1)
    model, task = reference.load("tail")
    model.requires_grad_(False)
    problems = [task.problem("test", i) for i in range(2 * FEW)]
    base = Rule(window=57, interval=28, total=True)
    for ratio in (0.5, 0.3, 0.1, 0.0):
        rule = replace(base, ratio=ratio)
        store.cell("tail", asdict(rule), partial(_masked, model, task, problems, rule))


def _masked(model: Any, task: Any, problems: list[Any], rule: Rule) -> list[Row]:
    found = search(model, task, problems, rule)
    return [{"episode": p.index, **asdict(f)} for p, f in zip(problems, found, strict=True)]


def _scores(model: Any, task: Any, problems: list[Any]) -> Iterator[Row]:
    """Of searches with everything kept: how attention is spread, how gradients rank, equation 4."""
    from scipy.stats import spearmanr

    rule = Rule(interval=INTERVAL, window=WINDOW)
    for episode, seen in enumerate(observe(model, task, problems, RATIOS, rule)):
        prompt, attended, moved = seen.prompt, seen.attended, seen.moved
        row: dict[str, Any] = {"episode": episode}
        for ratio in RATIOS:
            row[f"over_{ratio:g}"], row[f"worst_{ratio:g}"] = (
                seen.over[ratio],
                seen.worst[ratio],
            )
        for name, part in (("all", attended), ("generated", attended[prompt:])):
            falling = np.sort(part)[::-1] / part.sum()
            n = len(falling)
            row[f"top_fifth_{name}"] = float(falling[: n // 5].sum())
            row[f"bottom_half_{name}"] = float(falling[n - n // 2 :].sum())
            row[f"bottom_3_percent_{name}"] = float(falling[n - round(0.03 * n) :].sum())
            row[f"bottom_5_percent_{name}"] = float(falling[n - round(0.05 * n) :].sum())
        rank = spearmanr(attended[prompt:], moved[prompt:]).statistic
        yield row | {"tokens": len(attended), "spearman": float(rank)}


# Bytes and seconds


def _prototype(profile: HardwareProfile) -> HardwareProfile:
    """With the bandwidths that the paper measured."""
    return replace(
        profile, h2d_bytes_per_s=UP, d2h_bytes_per_s=DOWN, block_efficiency=(1.0,) * 4
    )  # fmt: skip


def system(store: Store) -> None:
    """Tables 6 and 10, Figures 7, 10 and 11: the prototype's machine, one search at a time."""
    arms = {
        "full": ("full", "1", {}),
        "eviction 50%":
            ("h2o", "0.7", {"per": "shared", "pin_prompt": "true", "recent_share": "0.1"}),
        "hierarchy 50% HBM, 10% evicted": ("hierarchy", "1", {"evict_ratio": "0.1"}),
        "hierarchy 30% HBM, 10% evicted":
            ("hierarchy", "1", {"hbm_ratio": "0.3", "evict_ratio": "0.1"}),
        "hierarchy 50% HBM, 5% evicted": ("hierarchy", "1", {"evict_ratio": "0.05"}),
        "hierarchy 50% HBM, none evicted": ("hierarchy", "1", {"evict_ratio": "0"}),
    }  # fmt: skip
    geometry = with_types(load_geometry(MODEL), "fp8", "")  # a byte per weight, as int8
    profile = _prototype(load_profile("rtx5080"))
    for label, (name, budget, settings) in arms.items():
        for recall in ("stage", "stream", "near") if name == "hierarchy" else ("stage",):
            machine = Machine(profile, geometry, recall=recall)
            make = partial(_replayed, name, budget, settings, machine)
            store.cell("system", {"label": label, "recall": recall}, make)


def _replayed(name: str, budget: str, settings: dict[str, str], machine: Machine) -> Iterator[Row]:
    found = Replay([TRACE], [build(name, settings)], [Budget.parse(budget)], machine, quality=False)
    for result in found.run().episodes:
        m = result.measured
        time = m.time
        moved = time.exposed_transfer_s + time.hidden_transfer_s
        yield {
            "episode": result.episode,
            "tokens": m.generated_tokens,
            "seconds": time.total_s,
            "tokens_per_s": m.generated_tokens / time.total_s,
            "transfer_share": moved / time.total_s,
            "exposed_share": time.exposed_transfer_s / time.total_s,
            "policy_share": time.policy_s / time.total_s,
            "peak_hbm_bytes": m.peak_hbm_kv_bytes,
            "peak_tokens": m.peak_hbm_kv_tokens,
            "peak_staging_bytes": m.peak_staging_bytes,
            "peak_ddr_bytes": m.peak_ddr_bytes,
            "full_bytes": (m.prompt_tokens + m.generated_tokens) * result.kv_bytes_per_token,
            "evicted_tokens": m.evicted_tokens,
        }


def transfers(store: Store) -> None:
    """Figures 5 and 6: what moving all layers' keys and values takes at the paper's bandwidths."""
    geometry = load_geometry(MODEL)
    for tokens in (64, 600):
        for kv_heads in (geometry.kv_heads, 28):
            size = tokens * replace(geometry, kv_heads=kv_heads).kv_bytes_per_token
            store.cell(
                "transfers", {"tokens": tokens, "kv_heads": kv_heads},
                partial(list, [{"bytes": size, "down_s": size / DOWN, "up_s": size / UP}]),
            )  # fmt: skip


#: Tables 11 and 18: model, bits of a weight, sequences, tokens of each, and what is printed in GB.
SIZES = (
    ("7B fp16, batch 1, 2K", MODEL, "", 1, 2000, 0.5, 0.3),
    ("7B fp16, batch 8, 2K", MODEL, "", 8, 2000, 3.8, 2.3),
    ("7B fp16, batch 1, 16K", MODEL, "", 1, 16000, 3.8, 2.3),
    ("7B int4, batch 8, 2K", MODEL, "int4", 8, 2000, 3.8, 2.3),
    ("70B fp16, batch 8, 4K", "llama-3.1-70b", "", 8, 4000, 80.0, 48.0),
    ("70B int4, batch 8, 4K", "llama-3.1-70b", "int4", 8, 4000, 80.0, 48.0),
)


def sizes(store: Store) -> None:
    """Tables 11 and 18: keys and values, their share of memory, and what 60% of them are."""
    for label, model, weights, sequences, tokens, printed, saved in SIZES:
        geometry = with_types(load_geometry(model), weights, "")
        kv = sequences * tokens * geometry.kv_bytes_per_token
        row = {
            "kv_bytes": kv, "kv_share": kv / (kv + geometry.weight_bytes), "saved_bytes": 0.6 * kv,
            "printed_bytes": printed * 1e9, "printed_saved_bytes": saved * 1e9,
        }  # fmt: skip
        store.cell("sizes", {"label": label}, partial(list, [row]))


def serving(store: Store) -> None:
    """Section 4.10 and Table 18: throughput of many searches at once, where the cache is large.

    As many clients as are told start one search after the other.  R1-Distill-Qwen-14B on an A100 of
    40 GB; the chains are those of the trace, their lengths times one.
    """
    profile, geometry = load_profile("a100-40"), load_geometry("r1-distill-qwen-14b")
    hierarchy = {"evict_ratio": "0.03"}
    arms = [("full", "full", {}, "stage")]
    arms += [
        (f"hierarchy, {recall}", "hierarchy", hierarchy, recall)
        for recall in ("stage", "stream", "near")
    ]
    for label, name, settings, recall in arms:
        machine = Machine(profile, geometry, recall=recall)
        missing = [
            clients for clients in (1, 8, 16, 32, 64)
            if not store.has("serving", {"label": label, "clients": clients})
        ]  # fmt: skip
        if not missing:
            continue
        policy, budget = build(name, settings), Budget.parse("1")
        engine = ServingEngine(
            list(record_demands(TRACE, policy, budget, machine)), profile, geometry,
            ServingOptions(),
        )  # fmt: skip
        for clients in missing:
            count = max(2 * clients, 18)
            report = engine.run(ClosedLoop(clients, tuple(i % 9 for i in range(count))))
            row = {
                "tokens_per_s": report.tokens / report.total_s,
                "preemptions": report.preemptions,
                "peak_hbm_bytes": report.peak_hbm_bytes,
                "kv_pool_bytes": engine.kv_bytes,
                "exposed_share": report.busy.exposed_s / report.total_s,
            }
            store.cell("serving", {"label": label, "clients": clients}, partial(list, [row]))


def experiments(store: Store) -> None:
    counting(store)
    sizes(store)
    transfers(store)
    system(store)
    serving(store)
    answers(store)
    tail(store)


if __name__ == "__main__":
    run("hierarchy", experiments)
