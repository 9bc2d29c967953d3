"""Small good inputs of every kind, and a command that reads each."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from arborsim import load_results
from arborsim.cli.app import main
from arborsim.products.plan.files import PlanLog
from arborsim.products.plan.plan import Planner
from arborsim.products.plan.workload_file import read_workload
from arborsim.trace.writer import TraceWriter
from tests.bank.banks import bank_columns, bank_info
from tests.helpers.traces import make_info, make_trace, random_trace_columns

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "traces" / "logs"
GOLDEN = ROOT / "tests" / "golden"


@dataclass(frozen=True)
class Target:
    """A file to damage, and the command line that reads it; ``{out}`` is a file to be made."""

    name: str
    file: Path
    kind: str
    command: tuple[str, ...]
    #: Where a copy of the file is put, for commands that go on with it; "" if they only read it
    copy: str = ""
    models: bool = False  #: whether it needs torch, which takes long to load


def make(folder: Path, models: bool) -> list[Target]:
    """The files, in this folder, and what reads them.

    Those of targets that need `models` are only made if they are wanted.
    """
    small = {"episodes": 2, "prompt": 6, "nodes": 4, "layers": 3}
    trace = make_trace(folder / "trace.parquet", **small)
    sparse = make_trace(folder / "sparse.parquet", attention="sparse", attention_top=4, **small)
    vectors = make_trace(
        folder / "vectors.parquet", capture="qkv", qkv_layers=(0, 1), hidden_layers=(1, 2),
        attention_layer_ids=(0, 2), **small,
    )  # fmt: skip
    bank = folder / "bank.parquet"
    with TraceWriter(bank, bank_info()) as writer:
        for seed in range(2):
            writer.write_episode(bank_columns(seed, width=3, depth=2))
    replay = ("--budget", "0.7", "--no-oracle", "--json", "--policy")
    targets = [
        Target("trace", trace, "parquet", ("replay", str(trace), *replay, "epikv,thinkv")),
        Target("sparse", sparse, "parquet", ("replay", str(sparse), *replay, "redundancy,lag-kv")),
        Target("vectors", vectors, "parquet", ("replay", str(vectors), *replay, "snapkv,rkv")),
        Target("inspect", trace, "parquet", ("inspect", str(trace), "--all")),
        Target("bank", bank, "parquet",
               ("search", str(bank), "--algorithm", "rebase,ets", "--width", "4", "--json")),
    ]  # fmt: skip
    targets += _texts(folder, trace)
    targets += _imports(folder)
    targets += _results(folder)
    targets += _interrupted(folder, models)
    return targets


def _texts(folder: Path, trace: Path) -> list[Target]:
    (folder / "mix.toml").write_text(
        (ROOT / "arborsim/policies/compositions/staircase.toml").read_text()
    )
    (folder / "gpu.toml").write_text((ROOT / "arborsim/machine/profiles/l40s.toml").read_text())
    (folder / "prices.toml").write_text((ROOT / "arborsim/machine/prices.toml").read_text())
    (folder / "calibration.toml").write_text(
        (ROOT / "arborsim/products/calibrate/shipped/chain-bands.toml").read_text().replace(
            "layers = 6", "layers = 3")
    )  # fmt: skip
    (folder / "workload.toml").write_text(
        (GOLDEN / "workload.toml").read_text()
        .replace("../../traces/chain-vectors.parquet", trace.name)
        .replace('{ use = "h2o", set = { per = "shared" } }, "hierarchy"',
                 '"streaming-llm", "random"')  # a plot takes three candidates
        .replace('"rtx4090", "h100"', '"h100"')
        .replace("searches = 30", "searches = 4").replace("warm_up = 5", "warm_up = 0")
        .replace("runs = 2", "runs = 1\nresolution = 0.5")
    )  # fmt: skip
    (folder / "grid.toml").write_text(
        f'traces = ["{trace.name}"]\npolicies = ["epikv", {{ use = "streaming-llm", '
        'set = { sinks = [2, 4] } }]\nbudgets = [0.7]\ngpus = ["gpu.toml"]\nepisodes = 1\n'
        'quality = false\nmodels = ["llama-3.1-8b"]\n[[cells]]\nrecalls = ["stream"]\n'
    )
    shutil.copy(ROOT / "arborsim/machine/tables/l40s-vllm.parquet", folder / "kernels.parquet")
    (folder / "measured.toml").write_text(
        (folder / "gpu.toml").read_text().replace('kernels = "l40s"', 'kernels = "kernels.parquet"')
    )
    model = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 128256, "torch_dtype": "bfloat16",
        "rope_theta": 500000.0, "tie_word_embeddings": False, "max_position_embeddings": 8192,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(model, indent=1))
    deep = model | {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
        "v_head_dim": 128, "n_routed_experts": 256, "num_experts_per_tok": 8,
        "n_shared_experts": 1, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
        "num_key_value_heads": 32,
    }  # fmt: skip
    (folder / "deepseek.json").write_text(json.dumps(deep, indent=1))

    def target(name: str, *command: str) -> Target:
        path = folder / name
        return Target(path.stem, path, path.suffix[1:], tuple(
            str(path) if each == "{file}" else each for each in command))  # fmt: skip

    shared = ("--budget", "0.7", "--no-oracle", "--json")
    return [
        target("grid.toml", "sweep", "{file}", "--out", "{out}"),
        target("kernels.parquet", "replay", str(trace), "--policy", "streaming-llm", "--gpu",
               str(folder / "measured.toml"), "--model", "llama-3.1-8b", *shared),
        target("mix.toml", "policies", "{file}"),
        target("gpu.toml", "replay", str(trace), "--policy", "streaming-llm", "--gpu", "{file}",
               *shared),
        target("prices.toml", "hardware", "--prices", "{file}", "--json"),
        target("calibration.toml", "replay", str(trace), "--policy", "epikv", "--calibration",
               "{file}", *shared),
        target("workload.toml", "plan", "{file}", "--json"),
        target("config.json", "models", "{file}", "--json"),
        target("deepseek.json", "models", "{file}", "--gpu", "h100"),
    ]  # fmt: skip


def _imports(folder: Path) -> list[Target]:
    found = []
    for name, log, *more in (
        ("tot", "tot.json"), ("tot", "tot-samples.json", "--prompt-tokens", "300"),
        ("tree", "tree.jsonl", "--root", "steps", "--value", "mc_value",
         "--tokens-per-character", "prose"), ("deft", "deft.json"),
        ("mooncake", "mooncake.jsonl"), ("bailian", "bailian.jsonl"), ("azure", "azure.csv"),
    ):  # fmt: skip
        path = folder / log
        shutil.copy(LOGS / log, path)
        command = ("import", name, str(path), "{out}.parquet", *more)
        found.append(Target(f"import {path.stem}", path, path.suffix[1:], command))
    return found


def _results(folder: Path) -> list[Target]:
    """What earlier runs wrote: results, logs, cells of sweeps."""
    made = {name: folder / f"{name}.parquet" for name in ("results", "searched", "planned")}
    log, workload = folder / "live.jsonl", str(folder / "workload.toml")
    for name, *command in (
        ("results", "replay", str(folder / "trace.parquet"), "--policy", "epikv"),
        ("searched", "search", str(folder / "bank.parquet"), "--width", "4"),
        ("planned", "plan", workload),
    ):  # fmt: skip
        _run(*command, "--out", str(made[name]), "--json")
    _run("sweep", str(folder / "grid.toml"), "--out", str(folder / "cells"))
    other, cell = folder / "other.parquet", min((folder / "cells").rglob("*.parquet"))
    shutil.copy(made["results"], other)
    shutil.copy(GOLDEN / "live.jsonl", log)
    answers = made["answers"] = load_results(log).save(folder / "answers.parquet")
    return [
        *(Target(name, file, "parquet", ("plot", str(file))) for name, file in made.items()),
        Target("compared", other, "parquet",
               ("compare", str(made["results"]), str(other), "--json")),
        Target("answers compared", answers, "parquet", ("compare", str(answers), str(log))),
        Target("cell", cell, "parquet", ("results", str(folder / "cells"), "--json")),
        Target("live log", log, "jsonl", ("plot", str(log))),
        Target("accuracy", log, "jsonl", ("plan", workload, "--answers", str(log), "--json")),
    ]  # fmt: skip


def _interrupted(folder: Path, models: bool) -> list[Target]:
    """What commands leave when they are killed, and go on with: logs, parts of recordings."""
    planner = Planner(read_workload(folder / "workload.toml"))
    planner.run()
    plan = PlanLog(folder / "plan.jsonl", planner.workload)
    plan.write(planner.finished.values())
    plan.close()
    info, parts = make_info(layers=3), folder / "half.parquet.parts"
    writer = TraceWriter(folder / "half.parquet", info)
    for seed in range(2):
        rng = np.random.default_rng(seed)
        writer.write_episode(random_trace_columns(rng, info, prompt=6, nodes=4))
    writer._lock.release()  # as the end of its process does
    del writer
    searches = ("--task", "chain", "--lines", "6", "--episodes", "2", "--max-tokens", "8")
    live = ("live", *searches, "--policy", "h2o", "--budget", "0.7", "--json", "--out")
    record = ("record", *searches, "--out")
    log, recorded = folder / "live-run.jsonl", folder / "recorded.parquet"
    if models:
        _run(*live, str(log))
        _run(*record, str(recorded))
    return [
        Target("plan log", folder / "plan.jsonl", "jsonl",
               ("plan", str(folder / "workload.toml"), "--out", "{out}.json", "--resume"),
               "{out}.json.partial.jsonl"),
        Target("parts", parts / "episode-000001.parquet", "parquet",
               ("replay", str(parts), "--policy", "streaming-llm", "--budget", "0.7", "--json")),
        Target("live --resume", log, "jsonl", (*live, "{out}.jsonl", "--resume"), "{out}.jsonl",
               models=True),
        Target("record --resume", recorded, "parquet", (*record, "{out}.parquet", "--resume"),
               "{out}.parquet", models=True),
    ]  # fmt: skip


def _run(*command: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        assert main(list(command)) == 0, command
