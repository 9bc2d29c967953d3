"""ARKV's claims that need no answers: what share is quantised, bytes, byte-seconds, throughput.

    python -m benchmarks.claims.arkv --out reports/claims

Records what it replays first, in ``build/claims`` (needs torch).  Experiments:

``oq``          the sensitivity of every layer and the quantised share that the public code logs
``precision``   what cuts really leave in FP8 and evict
``tuning``      the error of every trial by which temperatures and gamma were tuned here
``throughput``  the paper's four models, budgets and GPU: tokens per second, bytes, byte-seconds
``live``        live answers of its arms, taken over from what `benchmarks/quality.py` stored

About 4 minutes on one core.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.tiers import Budget, Tier, hbm_mask
from arborsim.core.tree import ThoughtTree
from arborsim.machine.executor import SimulatedExecutor
from arborsim.machine.lookup import load_geometry, load_profile
from arborsim.machine.machine import Machine
from arborsim.memory.moves import Moves
from arborsim.play.controller import Meter
from arborsim.play.episode import Cell, Played, play_episode
from arborsim.policies.base import Policy
from arborsim.policies.registry import build
from arborsim.products.calibrate.documents import read_calibration
from arborsim.signals.spread import LayerSensitivity
from arborsim.trace.episode import Episode, play
from arborsim.trace.reader import TraceReader
from benchmarks.claims import Row, Store, run

RECORDINGS = Path("build/claims")
#: Experiments of `benchmarks/quality.py` with arms of ARKV.
SEARCHES = ("arkv", "newer-game24", "tail")
EPISODES = 8
LINES = 64
#: The paper's models, under the names of their geometries, and its cache sizes.
MODELS = ("llama-3.2-3b", "llama-3.1-8b", "qwen3-4b", "qwen3-8b")
SIZES = ("512", "1024", "2048")
#: Prompt and generated tokens: GSM8K's 957 (by the public evict ratios), and a LongBench prompt of
#: about the length at which a cache of 512 evicts what the paper's Table VII says (4,197), as long
#: as the recording model's positions allow.
LENGTHS = ((957, 256), (3840, 128))
#: How the policies decide, and which of them do so at which budgets.
WAYS: dict[str, tuple[dict[str, str], dict[str, tuple[str, ...]]]] = {
    "equations": (
        {},
        {
            "arkv": ("0.25", "0.5", "0.75", "1"),
            "arkv-origin": ("0.5", "1"),
            "arkv-quant": ("0.5", "1"),
        },
    ),
    "cut at every token": ({"slack": "1"}, {"arkv": ("0.5",)}),
    "as published": ({"as_published": "true"}, {"arkv": ("0.5",), "arkv-quant": ("0.5",)}),
}


class Precision(Meter):
    """Share of the tokens held in HBM that are quantised: mean over groups, then iterations.

    An iteration counts with what was decided after it, which the next one reads.
    """

    def __init__(self) -> None:
        self._shares: list[float] = []

    def ran(self, run: TokenRun, tree: ThoughtTree, tier: np.ndarray, moves: Moves) -> None:
        new = np.zeros((len(tier), run.num_tokens), dtype=np.int8)
        now, old = np.concatenate([tier, new], axis=1), tier.shape[1]
        for step in range(run.steps):
            moves.between_steps(step, step + 1).carry_out(now)
            self._shares.append(_quantised(now[:, : old + (step + 1) * len(run.leaves)]))

    def moved(self, moves: Moves, tier: np.ndarray, reads: np.ndarray | None = None) -> None:
        if self._shares:
            now = tier.copy()
            moves.carry_out(now)
            self._shares[-1] = _quantised(now)

    @property
    def share(self) -> float:
        return float(np.mean(self._shares))


def _quantised(tier: np.ndarray) -> float:
    quantised = np.count_nonzero(tier == Tier.HBM_QUANTISED, axis=1)
    return float((quantised / hbm_mask(tier).sum(axis=1)).mean())


def chains() -> TraceReader:
    """Chains of `LINES` lines with the vectors of all layers."""
    from arborsim import record

    path = RECORDINGS / f"chains-{LINES}.parquet"
    if not path.exists():
        RECORDINGS.mkdir(parents=True, exist_ok=True)
        record(
            path, model="chain", lines=LINES, episodes=EPISODES, capture="qkv", qkv_layers="all",
            attention="sparse", attention_top=8,
        )  # fmt: skip
    return TraceReader(path)


def long_prompts() -> TraceReader:
    """Two searches of the lengths `LENGTHS`: chains one after the other, only lengths matter."""
    from arborsim import record
    from arborsim_torch.reference import get_task
    from arborsim_torch.reference.chain import ChainTask

    path = RECORDINGS / "long-prompts.parquet"
    if not path.exists():
        RECORDINGS.mkdir(parents=True, exist_ok=True)
        task = get_task("chain")
        assert isinstance(task, ChainTask)
        problems = [task.problem("test", i, lines=LINES) for i in range(9)]
        asked = [token for each in problems for token in (*each.prompt, *task.solution(each))]
        # No answer among them: it would end the search.
        program = problems[0].data
        said = [token for k in range(LINES) for token in task.line(program, k)]
        given = path.with_suffix(".jsonl")
        lines = [
            json.dumps({"prompt": asked[:prompt], "tokens": said[:more]})
            for prompt, more in LENGTHS
        ]
        given.write_text("\n".join(lines) + "\n")
        record(
            path, model="chain", teacher_forced=given, capture="qkv", qkv_layers="all",
            attention="sparse", attention_top=8,
        )  # fmt: skip
    return TraceReader(path)


def played(
    episode: Episode, policy: Policy, budget: str, machine: Machine, *meters: Meter
) -> Played:
    executor = SimulatedExecutor.of(machine, policy, episode.info)
    return play_episode(episode, Cell(policy, Budget.parse(budget)), executor, meters=meters)


def sensitivity(reader: TraceReader, window: int = 32) -> Iterator[Row]:
    """OQ ratios of every prompt; `logged` is what the public code prints as the quantised share.

    That is the mean of ``1 - OQ_l / max OQ`` over the layers where it is not 0 (its `mix_cache.py`
    and `eval.py`): it is known after the prompt, and no cache enters it.
    """
    score = LayerSensitivity("layer", window)
    for episode in reader.episodes(score.needs):
        prompt = next(iter(play(episode)))
        of_layer = score.of_prompt(prompt.run)  # type: ignore[union-attr]
        ratio = of_layer / of_layer.max()
        less = 1.0 - ratio[ratio < 1.0]
        row: dict[str, Any] = {
            "episode": episode.index,
            "logged": float(less.mean()),
            "all_layers": float((1.0 - ratio).mean()),
        }
        yield row | {f"ratio_{layer}": float(each) for layer, each in enumerate(ratio)}


def precision(reader: TraceReader, policy: Policy, budget: str) -> Iterator[Row]:
    machine = Machine(load_profile("a6000", engine="transformers"))
    for episode in reader.episodes(policy.reads()):
        meter = Precision()
        measured = played(episode, policy, budget, machine, meter).measured
        yield {
            "episode": episode.index,
            "quantised": meter.share,
            "ever_quantised": measured.quantised_tokens / episode.num_tokens,
            "evicted": measured.evicted_tokens / episode.num_tokens,
            "decisions": measured.decisions,
        }


def throughput(reader: TraceReader, policy: Policy, budget: str, model: str) -> Iterator[Row]:
    machine = Machine(load_profile("a6000", engine="transformers"), load_geometry(model))
    for episode in reader.episodes(policy.reads()):
        found = played(episode, policy, budget, machine)
        measured, time = found.measured, found.measured.time
        allowed = found.budget_tokens * machine.charged(episode.info).kv_bytes_per_token
        yield {
            "length": f"{measured.prompt_tokens} + {measured.generated_tokens}",
            "tokens_per_s": episode.num_tokens / time.total_s,
            "generated_per_s": measured.generated_tokens / (time.total_s - time.prefill_s),
            "policy_share": time.policy_s / time.total_s,
            "peak_bytes": measured.peak_hbm_kv_bytes,
            "held_bytes": measured.peak_after_first_decision_bytes,
            "held_of_budget": measured.peak_after_first_decision_bytes / allowed,
            "byte_seconds": measured.hbm_byte_seconds,
            "evicted": measured.evicted_tokens / episode.num_tokens,
        }


def tuning(kind: str) -> Iterator[Row]:
    """Trials of the shipped calibration (``arborsim calibrate arkv``); the first is the paper's.

    `kind` is "errors", of the episodes tuned on, or "held_out": with the paper's values, and tuned.
    """
    for trial, error in enumerate(read_calibration("chain-arkv").evidence[kind]):
        yield {"trial": trial, "output_error": error}


def live(store: Store) -> None:
    """Answers of ARKV, its baselines and full retention; run ``benchmarks/quality.py`` first.

    Experiments and arms that are not there are left out.
    """
    for search in SEARCHES:
        path = Path(f"build/quality/{search}.jsonl")
        head, *lines = map(json.loads, path.read_text().splitlines()) if path.exists() else [{}]
        for number, arm in enumerate(head.get("arms", ())):
            found = {line["episode"]: line for line in lines if line["arm"] == number}
            rows = [
                {"episode": each, **{key: found[each][key] for key in ("correct", "full_tokens")}}
                for each in sorted(found)
                if not found[each]["infeasible"]
            ]
            if rows and arm["policy"] in ("full", *WAYS["equations"][1]):
                setting = {"search": search, "label": arm["label"], "budget": arm["budget"]}
                store.cell("live", setting, partial(list, rows))


def experiments(store: Store) -> None:
    live(store)
    for kind in ("errors", "held_out"):
        store.cell("tuning", {"model": "chain", "of": kind}, partial(tuning, kind))
    reader = chains()
    for window in (32, 16):
        store.cell("oq", {"model": "chain", "window": window},
                   lambda w=window: sensitivity(reader, w))  # fmt: skip
    long = long_prompts()
    for model in MODELS:
        for name in ("full", *WAYS["equations"][1]):
            for size in SIZES if name != "full" else ("1",):
                setting = {"model": model, "policy": name, "way": "equations", "budget": size}
                policy = build(name)
                store.cell("throughput", setting, lambda p=policy, s=size, m=model: throughput(
                    long, p, s, m))  # fmt: skip
    for way, (settings, budgets) in WAYS.items():
        for name, budget in ((n, each) for n in budgets for each in budgets[n]):
            policy = build(name, settings)
            setting = {"model": "chain", "policy": name, "way": way, "budget": budget}
            store.cell("precision", setting,
                       lambda p=policy, b=budget: precision(reader, p, b))  # fmt: skip


if __name__ == "__main__":
    run("arkv", experiments)
