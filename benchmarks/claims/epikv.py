"""What the EpiKV paper measures besides answers: signals against importance, memory and time.

    python -m benchmarks.claims.epikv --out reports/claims

Writes ``epikv.parquet``; finished cells are kept.

- ``signals``: rank correlation (`rho`, its `size`, and `auc`) of every signal of the paper with
  labels of importance, on greedy reasonings of the reference models that end right: Table 2,
  Figure 5, Tables 10 and 11, appendices E and F; ``pooled`` has them over the tokens of all traces.
- ``answers``: right answers, and needed steps written down right, of masked searches
  (`benchmarks.claims.frozen`) with and without the paper's smoothing; ``full`` with all kept.
- ``important``: the share of tokens that a kind of label calls important.
- ``answers``: right answers, and needed steps written down right, of masked searches
  (`benchmarks.claims.frozen`) under the paper's scores with and without their smoothing.
- ``forward``, ``requests``, ``state``, ``replay``, ``paged``: memory of a forward pass, requests
  that fit, what the method remembers, one long reasoning under the paper's policies, and memory in
  pages, all of Llama-3.1-8B on the paper's GPUs: Figures 1, 4 and 6, Tables 5 to 8.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from arborsim.core.statistics import auc, spearman
from arborsim.core.tiers import Budget
from arborsim.machine.cost import CostModel
from arborsim.machine.lookup import load_geometry, load_profile
from arborsim.machine.machine import Machine
from arborsim.policies.methods.epikv import EpiKV
from arborsim.policies.registry import build
from arborsim.products.calibrate.bands import ROLLING, token_labels
from arborsim.products.replay.run import Replay
from arborsim.signals.rolling import EPSILON, Band, HiddenChangeContrast, rolling_mean, rolling_z
from benchmarks.claims import Row, Store, run
from benchmarks.generate import generate as generate_trace

NOTHING = np.empty(0)
GIB = 2**30
CHAINS = Path("traces/chain-linear.parquet")
#: A MATH-500 or AIME-2024 reasoning of the paper: what its Table 8 saves at 512 tokens, 2.9 GB, is
#: the cache of about 22,100 tokens of Llama-3.1-8B.
LONG_TOKENS = 22_656
POLICIES = ("full", "epikv", "hs-variance", "band-adaptive", "kv-key", "kv-value", "lag-kv",
            "h2o", "raas", "thinkv", "attn-hs", "segment-hs")  # fmt: skip


# --- signals ---------------------------------------------------------------------------------


#: What an occlusion regenerates, and tokens of its window and stride; the first is the paper's.
OCCLUSIONS = {"answer": ("answer", 32, 16), "rest": ("rest", 32, 16)}
#: Kinds of labels: an occlusion, what the task's rules read later, attention of later tokens, and
#: a token's place in the reasoning.
LABELS = ("answer", "needed", "attention", "position")
#: Reference models, program lines of their problems, reasonings, kinds of labels.
MODELS = (
    ("chain", 32, 32, LABELS), ("tail", 16, 16, LABELS[1:]), ("tail-deep", 16, 8, LABELS[1:]),
    ("chain", 16, 32, LABELS), ("chain", 32, 32, ("rest",)),
)  # fmt: skip

Signals = dict[tuple[str, int], np.ndarray]
"""Float64 ``[tokens]``, by name and layer; -1 is the mean over layers."""


@dataclass(frozen=True)
class Reasoning:
    """Signals of the reasoning tokens of one trace, and what its tokens are worth."""

    problem: int
    signals: Signals
    #: By kind of label: bool ``[tokens]``, or float64 of `attention`
    labels: dict[str, np.ndarray]


def smoothed(values: np.ndarray) -> dict[str, np.ndarray]:
    """A signal as it is and under the paper's smoothings: float64 ``[tokens]`` each.

    Appendix E: a rolling mean of 64 tokens and an exponential one that keeps 0.9; Eq. 3: the
    z-score.  All trail over reasoning tokens only.
    """
    mean = values.copy()
    for t in range(1, len(mean)):
        mean[t] = 0.9 * mean[t - 1] + 0.1 * values[t]
    return {
        "raw": values,
        "rolling-64": rolling_mean(NOTHING, values, ROLLING),
        "ema-0.9": mean,
        "z-64": rolling_z(NOTHING, values, ROLLING, EPSILON),
    }


def layers_of_paper(depth: int) -> tuple[int, int]:
    """Layers 10 and 21 of 32, at the same shares of the depth, as `epikv` takes them."""
    return Band(10 / 32, 10 / 32).layers(depth)[0], Band(21 / 32, 21 / 32).layers(depth)[0]


def scores(signals: Signals) -> Iterator[tuple[str, int, str, np.ndarray]]:
    """Every signal under every smoothing, and contrasts of two layers: name, layer, smoothing."""
    made = {key: smoothed(values) for key, values in signals.items()}
    for (name, layer), ways in made.items():
        for way, values in ways.items():
            yield name, layer, way, values
    depth = 1 + max(layer for name, layer in signals if name == "hidden change")
    a, b = (made["hidden change", layer] for layer in layers_of_paper(depth))
    for name, way in (("epikv", "z-64"), ("hs-variance", "rolling-64"), ("hs-contrast", "raw")):
        yield name, -1, way, a[way] - b[way]


def measure(model: Any, prompt: tuple[int, ...], body: tuple[int, ...]) -> dict[str, Any]:
    """Run a model over prompt and reasoning once and read what the paper's signals are made of.

    Returns ``hidden`` and ``before``, ``keys``, ``values`` (each ``[layers, ...]``) and
    ``attention``, the mean over layers and heads, with the mean entropy of its rows; float64.
    """
    import torch

    hidden: list[Any] = []
    before: list[Any] = []
    hooks = []

    def output(_module: Any, _inputs: Any, out: Any) -> None:
        hidden.append(out[0] if isinstance(out, tuple) else out)

    def keys(_module: Any, _inputs: Any, out: Any) -> None:
        before.append(out)

    for layer in model.model.layers:
        hooks.append(layer.register_forward_hook(output))
        hooks.append(layer.self_attn.k_proj.register_forward_hook(keys))
    try:
        with torch.no_grad():
            made = model(torch.tensor([[*prompt, *body]]), output_attentions=True, use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
    heads, dim = model.config.num_key_value_heads, model.config.head_dim
    cache = made.past_key_values.layers
    rows = torch.stack([layer[0] for layer in made.attentions]).double()  # [layers, heads, n, n]
    logs = torch.where(rows > 0, rows.log(), torch.zeros((), dtype=rows.dtype))
    return {
        "hidden": torch.stack([h[0] for h in hidden]).double().numpy(),
        "before": torch.stack([k[0].view(-1, heads, dim) for k in before]).double().numpy(),
        "keys": torch.stack([c.keys[0].transpose(0, 1) for c in cache]).double().numpy(),
        "values": torch.stack([c.values[0].transpose(0, 1) for c in cache]).double().numpy(),
        "attention": rows.mean((0, 1)).numpy(),
        "entropy": -(rows * logs).sum(-1).mean((0, 1)).numpy(),
    }


def signals_of(seen: dict[str, Any], prompt: int) -> Signals:
    """The paper's signals of the reasoning tokens (its Table 1 and appendix E)."""
    change = np.linalg.norm(np.diff(seen["hidden"], axis=1), axis=-1)[:, prompt - 1 :]
    found = {("hidden change", layer): g for layer, g in enumerate(change)}
    for name, what in (
        ("key variance", "keys"), ("key variance before RoPE", "before"),
        ("value variance", "values"),
    ):  # fmt: skip
        found[name, -1] = seen[what].var(axis=-1).mean(axis=(0, 2))[prompt:]
    found["attention entropy", -1] = seen["entropy"][prompt:]
    found["cumulative attention", -1] = seen["attention"][:, prompt:].sum(axis=0)
    return found


def read_later(attention: np.ndarray, prompt: int) -> np.ndarray:
    """Mean attention that each reasoning token gets from tokens at least `ROLLING` later.

    Float64 ``[tokens]``; the newest, which have no such readers, get NaN.
    """
    rows = attention[prompt:, prompt:]
    later = np.tril(np.ones(rows.shape, dtype=bool), -ROLLING)
    readers = later.sum(axis=0)
    return np.where(readers > 0, (rows * later).sum(axis=0) / np.maximum(readers, 1), np.nan)


def read_by_rule(readers: list[Any], prompt: int, lines: int) -> np.ndarray:
    """Whether a later line of the reasoning reads a token: bool ``[tokens]``.

    `readers` are the task's: of each token the step that follows it, its own and later readers.  A
    line and the filler after it may be several steps; the question is read by the very last.
    """
    each = max(readers[prompt - 1]) // lines
    return np.array([max(steps) // each > steps[0] // each for _, *steps in readers[prompt:]])


def reasonings(name: str, lines: int, count: int, kinds: Sequence[str]) -> list[Reasoning]:
    """Greedy reasonings of test problems that end right, with signals and labels of these kinds."""
    from arborsim.products.calibrate.backend import ModelChoice, OcclusionRequest
    from arborsim_torch import reference
    from arborsim_torch.calibration import occlude
    from arborsim_torch.reference.chain import ANSWER_TOKENS

    model, task = reference.load(name, attn_implementation="eager", lines=lines)
    occluded = {}
    for kind in OCCLUSIONS.keys() & set(kinds):
        regenerate, window, stride = OCCLUSIONS[kind]
        request = OcclusionRequest(
            ModelChoice(name, task_options={"lines": lines}), count, "test",
            window=window, stride=stride, regenerate=regenerate,
        )  # fmt: skip
        traces = occlude(request, lambda *_: None).traces
        occluded[kind] = {trace.problem: token_labels(trace) for trace in traces}
    result = []
    for problem, tokens in _solved(model, task, count):
        length, prompt = len(tokens) - ANSWER_TOKENS, len(problem.prompt)
        seen = measure(model, problem.prompt, tokens[:length])
        labels = {
            **{kind: own[problem.index] for kind, own in occluded.items()},
            "attention": read_later(seen["attention"], prompt),
            "needed": read_by_rule(task.readers(problem, tokens), prompt, lines)[:length],
            "position": np.arange(length, dtype=np.float64),
        }
        own = {kind: labels[kind] for kind in kinds}
        result.append(Reasoning(problem.index, signals_of(seen, prompt), own))
    return result


def _solved(model: Any, task: Any, count: int) -> list[tuple[Any, tuple[int, ...]]]:
    """The first test problems that are answered right, and their reasonings."""
    from arborsim_torch.reference.decoder import generate

    found: list[tuple[Any, tuple[int, ...]]] = []
    tried = 0
    while len(found) < count:
        problems = [task.problem("test", tried + i) for i in range(count - len(found))]
        tried += len(problems)
        for problem, own in zip(problems, generate(model, task, problems, batch=32), strict=True):
            if task.judge(problem, own.tokens).correct:
                found.append((problem, tuple(own.tokens)))
    return found


def share_rows(traces: list[Reasoning], kind: str) -> Iterator[Row]:
    """How many tokens of each trace a kind of label calls important."""
    for trace in traces:
        yield {"episode": trace.problem, "share": float(trace.labels[kind].mean())}


def signal_rows(traces: list[Reasoning], kind: str) -> Iterator[Row]:
    """Agreement of the signals with a kind of label, in each trace."""
    for trace in traces:
        for *key, values in scores(trace.signals):
            for found in _agreement(values, trace.labels[kind]):
                yield {**dict(zip(KEY, key, strict=True)), "episode": trace.problem, **found}


def pooled_rows(traces: list[Reasoning], kind: str) -> Iterator[Row]:
    """The same over the tokens of all traces together, as in the paper's Table 2."""
    label = np.concatenate([trace.labels[kind] for trace in traces])
    for same in zip(*(scores(trace.signals) for trace in traces), strict=True):
        for found in _agreement(np.concatenate([values for *_, values in same]), label):
            yield {**dict(zip(KEY, same[0][:-1], strict=True)), **found}


KEY = ("signal", "layer", "smoothing")


def _agreement(values: np.ndarray, label: np.ndarray) -> Iterator[Row]:
    """One row, or none if all labels are alike: that says nothing."""
    known = ~np.isnan(label.astype(np.float64))
    rho = spearman(values[known], label[known])
    if not np.isnan(rho):
        area = auc(values, label) if label.dtype == bool else np.nan
        yield {"rho": rho, "size": abs(rho), "auc": area, "tokens": int(known.sum())}


# --- machine ---------------------------------------------------------------------------------


def forward_rows() -> Iterator[Row]:
    """Figure 1: bytes of a forward pass, with the logits of all tokens as transformers makes them.

    The eager pass keeps the attention matrices of all layers, as ``output_attentions`` does.
    """
    profile, g = load_profile("a100-80"), load_geometry("llama-3.1-8b")
    cost = CostModel(profile, g)
    for path in ("fused", "eager"):
        for tokens in (2**k for k in range(10, 19)):
            kept = g.layers * cost.prompt_rows_bytes(tokens) if path == "eager" else 0
            logits = 2 * tokens * g.vocab
            cache = tokens * g.kv_bytes_per_token
            needed = g.weight_bytes + cache + cost.workspace_bytes(tokens) + kept + logits
            yield {"path": path, "tokens": tokens, "bytes": float(needed),
                   "fits": needed <= profile.hbm_bytes}  # fmt: skip


def request_rows() -> Iterator[Row]:
    """Figure 6: requests that fit on 80 GB, by context, with and without a budget of 2,048."""
    token = load_geometry("llama-3.1-8b").kv_bytes_per_token
    room = 0.9 * 80 * GIB - 16 * GIB
    for tokens in (2**k for k in range(11, 18)):
        for kept, policy in ((tokens, "full"), (2_048, "epikv")):
            count = int(room // (kept * token))
            yield {"policy": policy, "tokens": tokens, "requests": count}


def state_rows() -> Iterator[Row]:
    """What `epikv` remembers of a token, against the token's keys and values."""
    policy = build("epikv")
    assert isinstance(policy, EpiKV)
    assert isinstance(policy.score, HiddenChangeContrast)
    own = 8 * (1 + len(policy.score.bands.bands))  # a score, and one number per layer that is read
    token = load_geometry("llama-3.1-8b").kv_bytes_per_token
    yield {"policy": "epikv", "state_bytes": own, "state_share": own / token}


def replay_rows(gpu: str, budget: str) -> Iterator[Row]:
    """One long reasoning under each policy, all equally long: Tables 5 to 8 and Figure 4.

    `as_run_s` adds what the eager attention of transformers moves besides: keys and values of a KV
    head copied to each of its query heads, written once and read once.  The policies that need
    attention pay it, and full retention where it is called eager.
    """
    profile, geometry = load_profile(gpu), load_geometry("llama-3.1-8b")
    signals = ("hidden_change", "key_variance", "value_variance", "lag_key", "lag_value")
    repeats = 2 * geometry.heads // geometry.kv_heads
    rate = profile.hbm_bytes_per_s * profile.kv_read_efficiency
    own = {"h2o": {"per": "shared"}, "raas": {"variant": "median"}}  # as EpiKV's authors run them
    policies = [build(name, own.get(name)) for name in POLICIES]
    with tempfile.TemporaryDirectory() as folder:
        path = generate_trace(Path(folder) / "long.parquet", 1, LONG_TOKENS, "sparse", signals)
        machine = Machine(profile, geometry)
        made = Replay([path], policies, [Budget.parse(budget)], machine, quality=False).run()
    fused = {policy.label: policy.fused for policy in policies}
    for result in made.episodes:
        m, name = result.measured, result.policy
        seconds = m.time.total_s
        row = {
            "policy": name, "seconds": seconds, "policy_share": m.time.policy_s / seconds,
            "peak_bytes": float(m.needed_hbm_bytes),
            "tokens_read": m.kv_read_bytes / geometry.kv_bytes_per_token / m.iterations,
        }  # fmt: skip
        copied_s = repeats * m.kv_read_bytes / rate
        yield {**row, "as_run_s": seconds + (0.0 if fused[name] else copied_s)}
        if name == "full":
            yield {**row, "policy": "full, eager", "as_run_s": seconds + copied_s}


def paged_rows(page: int) -> Iterator[Row]:
    """HBM of the shipped chains where memory is given out in pages, as serving engines do."""
    machine = Machine(load_profile("l40s"), load_geometry("llama-3.1-8b"), page_tokens=page)
    policies = [build(name) for name in ("full", "epikv", "kv-key", "lag-kv", "streaming-llm")]
    replay = Replay([CHAINS], policies, [Budget.parse("0.75")], machine, quality=False)
    for result in replay.run().episodes:
        yield {"policy": result.policy, "episode": result.episode,
               "peak_bytes": float(result.measured.peak_hbm_kv_bytes)}  # fmt: skip


def experiments(store: Store) -> None:
    """All cells; those of a model run its reasonings once."""
    store.cell("forward", {"gpu": "a100-80"}, forward_rows)
    store.cell("requests", {"gpu": "a100-80"}, request_rows)
    store.cell("state", {"model": "llama-3.1-8b"}, state_rows)
    for gpu, budget in product(("l40s", "a6000"), ("512", "2048", "8192")):
        store.cell("replay", {"gpu": gpu, "budget": budget}, partial(replay_rows, gpu, budget))
    for page in (1, 16):
        store.cell("paged", {"page": page, "budget": "0.75"}, partial(paged_rows, page))
    from benchmarks.claims.frozen import answers

    answers(store)
    for name, lines, count, kinds in MODELS:
        cells = {kind: {"model": name, "lines": lines, "label": kind} for kind in kinds}
        if all(store.has("signals", setting) for setting in cells.values()):
            continue
        traces = reasonings(name, lines, count, kinds)  # once for all labels
        for kind, setting in cells.items():
            store.cell("signals", setting, partial(signal_rows, traces, kind))
            store.cell("pooled", setting, partial(pooled_rows, traces, kind))
            if traces[0].labels[kind].dtype == bool:
                store.cell("important", setting, partial(share_rows, traces, kind))


if __name__ == "__main__":
    run("epikv", experiments)
