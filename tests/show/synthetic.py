"""Made-up results with the shapes of real ones: every policy's habits, no simulation."""

from __future__ import annotations

import math

import numpy as np

from arborsim.core.measurements import Measurements, MemorySeries, TimeSplit
from arborsim.core.tiers import NUM_TIERS, Tier
from arborsim.play.pictures import NOT_BORN, Frame, NodeRecord, TokenMap, TokenMapper, TreePicture
from arborsim.play.results import EpisodeResult, ReplayResult

KV_BYTES = 131_072
#: name: (attention lost at half budget, host s per decision, eager factor, offloads, rehydrates)
POLICIES = {
    "full": (0.0, 0.0, 1.0, False, False),
    "streaming-llm": (0.22, 2e-6, 1.0, False, False),
    "h2o": (0.04, 8e-5, 1.35, False, False),
    "epikv": (0.07, 3e-5, 1.0, False, False),
    "lag-kv": (0.09, 1e-5, 1.0, False, False),
    "hierarchy": (0.0, 4e-5, 1.0, True, False),
    "arborkv": (0.01, 5e-5, 1.0, True, True),
    "random": (0.35, 1e-6, 1.0, False, False),
}
#: Not among the policies by default.
OTHERS = {
    "oracle": (0.02, 1e-6, 1.0, False, False),
    **{f"method-{i:02}": (0.01 * (i + 3), 1e-5, 1.0, i % 7 == 3, i % 9 == 4) for i in range(26)},
}
_HABITS = POLICIES | OTHERS


def result(
    traces: tuple[str, ...] = ("chain-tree.parquet",),
    budgets: tuple[str, ...] = ("0.25", "0.5"),
    policies: tuple[str, ...] = tuple(POLICIES),
    episodes: int = 3,
    pictures: bool = True,
    errors: bool = False,
) -> ReplayResult:
    """A `ReplayResult` as `arborsim replay --report` would make it."""
    found, films, maps = [], [], []
    for trace in traces:
        for episode in range(episodes):
            linear = "linear" in trace
            nodes = chain() if linear else tree(np.random.default_rng(episode))
            for policy in policies:
                for budget in budgets if policy != "full" else ("any",):
                    found.append(_search(trace, episode, policy, budget, nodes, errors))
                    if pictures and episode == 0:
                        films.append(film(trace, episode, policy, budget, nodes))
                        maps.append(token_map(trace, episode, policy, budget, nodes))
    settings = {
        "GPU": "h100",
        "model geometry": "llama-3.1-8b",
        "KV bytes per token": f"{KV_BYTES:,}",
        "recall of DDR tokens": "stage",
        "tokens per page": "1",
        "versions": "arborsim 0.1.0, numpy 2.4.6",
        **{f"trace {trace}": "chain task, tot-dfs, seed 7, sha256 0123456789abcdef"
           for trace in traces},
    }  # fmt: skip
    return ReplayResult(
        tuple(found), tuple(films), settings, ("PCIe latency 8 us", "decode overhead 30 us/layer"),
        token_maps=tuple(maps),
    )  # fmt: skip


def tree(rng: np.random.Generator, most: int = 46) -> tuple[NodeRecord, ...]:
    """A search tree: a long prompt, a few open ends, pruned branches."""
    nodes = [NodeRecord(-1, 0, 420, math.nan, False, True)]
    frontier = [0]
    while frontier and len(nodes) < most:
        at = frontier.pop(0)
        for _ in range(int(rng.integers(2, 5))):
            depth = nodes[at].depth + 1
            pruned = bool(rng.random() < 0.35)
            nodes.append(
                NodeRecord(at, depth, int(rng.integers(8, 160)), float(rng.random()), pruned, True)
            )
            if not pruned and depth < 6:
                frontier.append(len(nodes) - 1)
    return tuple(nodes)


def chain(length: int = 5) -> tuple[NodeRecord, ...]:
    """A search that never branches."""
    nodes = [NodeRecord(-1, 0, 310, math.nan, False, True)]
    nodes += [NodeRecord(i, i + 1, 260 + 90 * i, math.nan, False, True) for i in range(length - 1)]
    return tuple(nodes)


def _share(policy: str, budget: str) -> float:
    return 1.0 if policy == "full" else float(budget)


def _search(
    trace: str,
    episode: int,
    policy: str,
    budget: str,
    nodes: tuple[NodeRecord, ...],
    errors: bool,
) -> EpisodeResult:
    lost, host_s, eager, offloads, rehydrates = _HABITS[policy]
    share = _share(policy, budget)
    prompt = nodes[0].tokens
    total = sum(node.tokens for node in nodes)
    generated = total - prompt
    gone = total * (1 - share)
    time = TimeSplit(
        prefill_s=0.021 * eager,
        decode_s=generated * 0.0069 * eager,
        policy_s=generated * host_s * (1 if policy != "h2o" else 30),
        exposed_transfer_s=0.21 * (1 - share) * generated * 0.0069 if offloads else 0.0,
        rehydration_s=0.03 * (1 - share) * 40 if rehydrates else 0.0,
        hidden_transfer_s=0.3 if offloads else 0.0,
    )
    measured = Measurements(
        prompt_tokens=prompt,
        generated_tokens=generated,
        iterations=generated,
        peak_hbm_kv_bytes=int(total * max(share, 0.0) * KV_BYTES),
        peak_hbm_kv_tokens=int(total * share),
        peak_ddr_bytes=int(gone * KV_BYTES * 0.7) if offloads else 0,
        evicted_tokens=0.0 if policy in ("full", "hierarchy") else gone * (0.4 if offloads else 1),
        offloaded_tokens=gone * 1.8 if offloads else 0.0,
        rehydrated_tokens=gone * 0.3 if rehydrates else 0.0,
        rehydrations=40 if rehydrates else 0,
        to_ddr_bytes=int(gone * 1.8 * KV_BYTES) if offloads else 0,
        from_ddr_bytes=int(gone * 1.1 * KV_BYTES) if offloads else 0,
        decisions=0 if policy == "full" else generated // 16,
        time=time,
        series=_series(total, prompt, share, time.total_s, offloads, episode),
    )
    kept = 1 - lost * 2 * (1 - share)
    error = 0.4 * (1 - kept) if errors else math.nan
    return EpisodeResult(
        trace, episode, policy, budget, int(total * share), measured, kept, KV_BYTES, error
    )


def _series(
    total: int, prompt: int, share: float, total_s: float, offloads: bool, seed: int
) -> MemorySeries:
    n = 2500
    rng = np.random.default_rng(seed)
    held = np.linspace(prompt, total, n)
    hbm = np.minimum(held, total * share * (0.97 + 0.03 * rng.random(n)))
    ddr = (held - hbm) * (0.7 if offloads else 0.0)
    staging = np.where(rng.random(n) < 0.1, 0.02 * total, 0.0) if offloads else np.zeros(n)
    flight = np.where(rng.random(n) < 0.15, 0.015 * total, 0.0) if offloads else np.zeros(n)

    def in_bytes(tokens: np.ndarray) -> list[int]:
        return (tokens * KV_BYTES).astype(int).tolist()

    return MemorySeries(
        np.linspace(0, total_s, n).tolist(),
        in_bytes(hbm),
        in_bytes(staging),
        in_bytes(flight),
        in_bytes(ddr),
    )


def token_map(
    trace: str, episode: int, policy: str, budget: str, nodes: tuple[NodeRecord, ...]
) -> TokenMap:
    """Tokens are born one by one; what is older than the budget's share leaves."""
    prompt, total = nodes[0].tokens, sum(node.tokens for node in nodes)
    mapper = TokenMapper(total, total - prompt)
    born = prompt + mapper.iterations[:, None]
    age = born - mapper.first_tokens[None, :]
    gone = Tier.DDR if _HABITS[policy][3] else Tier.EVICTED
    cells = np.where(age > _share(policy, budget) * total, gone, Tier.HBM)
    cells[age <= 0] = NOT_BORN
    return TokenMap(policy, budget, trace, episode, mapper.first_tokens, mapper.iterations,
                    cells.astype(np.uint8))  # fmt: skip


def film(
    trace: str, episode: int, policy: str, budget: str, nodes: tuple[NodeRecord, ...]
) -> TreePicture:
    """Nodes open one after another; what leaves the active path moves down a tier."""
    offloads = _HABITS[policy][3]
    frames = []
    step = max(1, len(nodes) // 38)
    for last in range(0, len(nodes), step):
        active, at = {last}, last
        while at >= 0:
            active.add(at)
            at = nodes[at].parent
        table = np.zeros((len(nodes), NUM_TIERS), dtype=np.int64)
        for i in range(last + 1):
            tokens = nodes[i].tokens
            if policy == "full" or i in active:
                table[i, 0] = tokens
                continue
            keep = int(tokens * _share(policy, budget) * (0.5 + 0.5 / (1 + last - i)))
            table[i, 0] = keep
            rest = tokens - keep
            if offloads:
                table[i, 1 + i % 5] = rest // 2
                table[i, Tier.EVICTED] = rest - rest // 2
            else:
                table[i, Tier.EVICTED] = rest
        label = f"turn to {last}" if last else "prompt"
        frames.append(Frame(0.4 * last, label, (last,), table))
    return TreePicture(policy, budget, trace, episode, nodes, tuple(frames))
