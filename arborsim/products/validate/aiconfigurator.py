"""Predictions of AIConfigurator, NVIDIA's planner of serving, for a served run.

It is asked through `aiconfigurator-core` alone (tried with 0.12), which ships tables of measured
kernels and the configurations of models, so nothing is fetched. The question is that of its own
`estimate` command: continuous batching of `concurrency` requests, a step taking up the prompt
tokens of one request, from the tables that its `query_versions.yaml` calls current for the GPU and
engine. The package is imported at the first question, and its messages are kept silent.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from arborsim.products.validate.serving import ServingRun

_PACKAGE = "aiconfigurator_core.sdk"


class Prediction(NamedTuple):
    """Times of a request, and output tokens per second of the whole system."""

    ttft_s: float
    tpot_s: float
    tokens_per_s: float


class NotPredicted(NamedTuple):
    """AIConfigurator gave no figure, and why."""

    reason: str


class _Checkpoint(NamedTuple):
    """A model as AIConfigurator names it, and the number formats its name does not already say."""

    path: str
    formats: Mapping[str, str] = {}


#: A checkpoint's own configuration says the formats of its weights and of its keys and values.
#: Where none of these weights ships with the package, another checkpoint of the model stands in.
_CHECKPOINTS = {
    ("llama-3.1-8b", "bfloat16"): _Checkpoint("meta-llama/Meta-Llama-3.1-8B"),
    ("llama-3.1-8b", "fp8"): _Checkpoint(
        "meta-llama/Meta-Llama-3.1-8B",
        {"gemm_quant_mode": "fp8_static", "kvcache_quant_mode": "fp8"},
    ),
    ("llama-3.1-8b", "fp8_block"): _Checkpoint(
        "meta-llama/Meta-Llama-3.1-8B", {"gemm_quant_mode": "fp8_block"}
    ),
    ("llama-3.1-70b", "bfloat16"): _Checkpoint("meta-llama/Meta-Llama-3.1-70B"),
    ("llama-3.1-70b", "fp8"): _Checkpoint("nvidia/Llama-3.1-70B-Instruct-FP8"),
    ("llama-3.1-70b", "nvfp4"): _Checkpoint(
        "nvidia/Llama-3.1-70B-Instruct-FP8", {"gemm_quant_mode": "nvfp4"}
    ),
    ("qwen3-32b", "bfloat16"): _Checkpoint("Qwen/Qwen3-32B"),
    ("qwen3-32b", "fp8"): _Checkpoint("Qwen/Qwen3-32B-FP8-Static-PerTensor"),
    ("qwen3-32b", "fp8_block"): _Checkpoint("Qwen/Qwen3-32B-FP8"),
    ("qwen3-235b-a22b", "bfloat16"): _Checkpoint("Qwen/Qwen3-235B-A22B"),
    ("qwen3-235b-a22b", "fp8"): _Checkpoint("Qwen/Qwen3-235B-A22B-FP8"),
    ("qwen3-235b-a22b", "fp8_block"): _Checkpoint("Qwen/Qwen3-235B-A22B-FP8"),
    ("qwen3-235b-a22b", "nvfp4"): _Checkpoint("nvidia/Qwen3-235B-A22B-NVFP4"),
    # One checkpoint exists, with experts in mxfp4, whatever a run says of its weights.
    ("gpt-oss-120b", "fp8"): _Checkpoint("openai/gpt-oss-120b"),
    ("gpt-oss-120b", "nvfp4"): _Checkpoint("openai/gpt-oss-120b"),
}

#: GPUs as AIConfigurator calls them, where a run names a profile.
_SYSTEMS = {"h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "a100-80": "a100_sxm"}


def installed() -> str:
    """The version of AIConfigurator that is installed; "" if none is."""
    try:
        return version("aiconfigurator-core")
    except PackageNotFoundError:
        return ""


def predicted(
    run: ServingRun, formats: Mapping[str, str] | None = None
) -> Prediction | NotPredicted:
    """Predict the times of a run, or say why AIConfigurator does not.

    `formats` overrides the checkpoint's, by AIConfigurator's names (`{"kvcache_quant_mode":
    "bfloat16"}`). Runs of the same model, GPU, engine and parallelism share what was loaded.
    """
    checkpoint = _CHECKPOINTS.get((run.model, run.weights))
    if checkpoint is None:
        return NotPredicted(f"no checkpoint of {run.model} with {run.weights} weights")
    chosen = tuple(sorted({**checkpoint.formats, **(formats or {})}.items()))
    experts = max(1, run.expert_parallel)  # 0 in a measurement means that it is not said
    if run.tensor_parallel % experts:
        return NotPredicted("the GPUs do not divide among the expert groups")
    with _silence():
        try:
            on = _SYSTEMS.get(run.gpu, run.gpu), run.engine, run.tensor_parallel, experts
            server = _server(checkpoint.path, chosen, *on)
            if isinstance(server, NotPredicted):
                return server
            return server.predict(run)
        except ImportError:
            raise
        except Exception as error:  # the package raises errors of many classes for what it lacks
            said = str(error).partition(" at /")[0]  # not where its tables lie on this machine
            return NotPredicted(f"{type(error).__name__}: {said}")


class _Server(NamedTuple):
    """A model on GPUs under an engine, as AIConfigurator holds it."""

    model: Any
    database: Any
    engine: Any

    def predict(self, run: ServingRun) -> Prediction | NotPredicted:
        """Predict a run of this server."""
        workload = _sdk("config").RuntimeConfig(
            isl=run.prompt_tokens, osl=run.output_tokens, batch_size=run.concurrency
        )
        summary = self.engine.run_agg(
            self.model, self.database, workload, ctx_tokens=run.prompt_tokens
        )
        if summary.check_oom():
            return NotPredicted("the model does not fit in the memory of the GPUs")
        result = summary.get_result_dict()
        if not result:
            return NotPredicted("no result")
        return Prediction(
            float(result["ttft"]) / 1e3, float(result["tpot"]) / 1e3, float(result["tokens/s"])
        )


@functools.cache
def _server(
    path: str, formats: tuple[tuple[str, str], ...], gpu: str, engine: str, gpus: int, experts: int
) -> _Server | NotPredicted:
    """Load the tables of a GPU and engine, and build the model's operations upon them."""
    models, databases = _sdk("models"), _sdk("perf_database")
    version = databases.get_latest_database_version(gpu, engine)
    database = version and databases.get_database_view(
        gpu, engine, version, database_mode="SILICON"
    )
    if not database:
        return NotPredicted(f"no tables of {engine} on {gpu}")
    sizes = {"tp_size": gpus, "pp_size": 1, "attention_dp_size": 1}
    sizes |= {"moe_tp_size": gpus // experts, "moe_ep_size": experts}
    config = _sdk("config_builders").build_model_config(**sizes, **dict(formats))
    # As `estimate` does: formats that the tables or the GPU lack give way before the model.
    models.resolve_context_fmha_by_data(config, path, database, engine, is_context_role=True)
    models.resolve_nvfp4_for_system(config, gpu, path, backend_name=engine)
    # Each server needs an engine of its own: it remembers results without the model in their key.
    return _Server(
        models.get_model(path, config, engine),
        database,
        _sdk("backends.factory").get_backend(engine),
    )


def _sdk(module: str) -> Any:
    """Import a module of the package at its first use."""
    return import_module(f"{_PACKAGE}.{module}")


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep what the package logs, warns of and prints from the reader, and only that."""
    loud = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            yield
    finally:
        logging.disable(loud)
