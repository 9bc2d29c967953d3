"""Published runs of serving engines, played on the simulated server that plans use.

A run is played as it was measured: `concurrency` clients in a closed loop, all there at 0,
`REQUESTS_PER_CLIENT` requests for each.  Requests have no prefix in common.  What is compared:

- *time to first token*, from arrival to the end of the prompt's computation, and *time per output
  token* after it, both means over all requests;
- *output tokens per second*: all output tokens over the whole time.  Where a file gives no such
  figure, Little's law does: ``concurrency * output / (ttft + tpot * (output - 1))``.

Constants of engines are fitted on half of the runs (`ServingRun.fitted`) and judged on the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.geometry import Geometry
from arborsim.machine import lookup
from arborsim.machine.config import with_kv_dtype
from arborsim.machine.lookup import engine_names, load_engine, load_geometry, load_profile
from arborsim.machine.machine import ServingOptions
from arborsim.machine.profile import HardwareProfile
from arborsim.machine.program import (
    ATTENDED_UNITS,
    FIXED,
    LEG_COLUMNS,
    LINEAR,
    DemandInfo,
    Op,
    SearchDemand,
    cut,
)
from arborsim.machine.report import ServingReport
from arborsim.machine.scheduler import ClosedLoop
from arborsim.machine.serving import ServingEngine
from arborsim.machine.weights import with_weights
from arborsim.products.validate.aiconfigurator import NotPredicted, Prediction, predicted
from arborsim.products.validate.serving import ENGINES, ServingRun

LATENCY_PERCENTILES = (50, 95, 99)
REQUESTS_PER_CLIENT = 10
#: The nightly benchmarks draw lengths evenly from this share of the stated one up to it.
SHORTEST_SHARE = 0.8
LENGTHS = 8  # that stand for an even distribution
#: Time to first token is judged where the median request waits for others less than this share.
LITTLE_QUEUEING = 0.2
GPUS_OF_A_NODE = 8
#: A run that computes its prompts at more than this share of the GPUs' peak is odd.
MOST_OF_PEAK = 0.5
SEED = 0
#: Weights of models whose makers publish one checkpoint in 8 bits: Qwen's has scales of blocks.
_CHECKPOINTS = {("qwen3-235b-a22b", "fp8"): "fp8_block"}
#: Peak of matrix products with quantised weights, as a multiple of that in bf16.
_PEAKS = {"bfloat16": 1.0, "fp8": 2.0, "fp8_block": 2.0, "nvfp4": 4.0}


class ServedMachine(NamedTuple):
    """The simulated server that a run is played on."""

    profile: HardwareProfile  # one GPU
    geometry: Geometry
    options: ServingOptions


def machine_of(run: ServingRun) -> ServedMachine:
    """The machine, model and rules of a run; a `UsageError` says what has no tables."""
    if run.engine not in ENGINES:
        raise UsageError(f"no tables of engine {run.engine}: known are {', '.join(ENGINES)}")
    _model(run.model)
    if run.data_parallel > 1:
        raise UsageError("several copies of the model, each with its share of the clients")
    profile = _profile(profile_name(run.gpu), engine_of(run))
    geometry = with_kv_dtype(_geometry(run), kv_dtype(run))
    tensor, expert = run.tensor_parallel, max(1, run.expert_parallel)
    options = ServingOptions(preemption="recompute", tensor_parallel=tensor, expert_parallel=expert)
    return ServedMachine(profile, geometry, options)


@cache
def _profile(gpu: str, engine: str) -> HardwareProfile:
    """A shipped GPU under a shipped engine, read once for all of their runs."""
    return load_profile(gpu, engine=engine)


@cache
def _model(name: str) -> Geometry:
    try:
        return load_geometry(name)
    except UnknownName:  # similar names would not help: a run is of this model
        raise UsageError(f"no geometry of model {name}") from None


def engine_of(run: ServingRun) -> str:
    """The engine profile of a run: that of its version, where there is one."""
    for name, versions in _versions().items():
        if name.startswith(f"{run.engine}-") and run.engine_version.startswith(versions):
            return name
    return run.engine


@cache
def _versions() -> dict[str, tuple[str, ...]]:
    """Versions that constants were fitted to, by engine; those of a version of its own alone."""
    found = {name: load_engine(name).versions for name in engine_names()}
    return {name: versions for name, versions in found.items() if versions}


def far(run: ServingRun) -> bool:
    """Whether no constant was fitted to this version of the engine."""
    versions = _versions().get(engine_of(run), ())
    return bool(run.engine_version and not run.engine_version.startswith(versions))


def _geometry(run: ServingRun) -> Geometry:
    """The model as it was served: some have one checkpoint only, whatever the row says."""
    geometry = _model(run.model)
    if geometry.expert_weights:  # gpt-oss: experts in mxfp4
        return geometry
    return with_weights(geometry, _CHECKPOINTS.get((run.model, run.weights), run.weights))


def profile_name(gpu: str) -> str:
    """The profile of a GPU of a run; `UsageError` if there is none."""
    name = lookup.profile_name(gpu)
    if name is None:
        raise UsageError(f"no profile of GPU {gpu}")
    return name


def kv_dtype(run: ServingRun) -> str:
    """Type of the KV cache, which no column says: bf16 unless the checkpoint asks for fp8.

    NVIDIA's quantised checkpoints do; TensorRT-LLM follows that by itself, the other engines only
    where they are told to.
    """
    quantised = run.weights in ("fp8", "nvfp4") and not _geometry(run).expert_weights
    return "fp8" if run.engine == "trtllm" and quantised else "bf16"


def lengths(run: ServingRun) -> tuple[list[int], list[int]]:
    """The lengths that prompts and outputs have, each equally often."""
    return _lengths(run, run.prompt_tokens, 1), _lengths(run, run.output_tokens, 2)


def _lengths(run: ServingRun, tokens: int, least: int) -> list[int]:
    """Middles of equal parts of the range that the benchmark draws from, or the stated length."""
    if not run.nightly:
        return [tokens]
    shares = SHORTEST_SHARE + (1 - SHORTEST_SHARE) * (np.arange(LENGTHS) + 0.5) / LENGTHS
    return [max(least, round(share * tokens)) for share in shares.tolist()]


class Kept(NamedTuple):
    """Tokens that a policy keeps of a request."""

    policy: str = "full"
    tokens: np.ndarray | None = None  # in each iteration, int64 ``[output - 1]``; None for all
    decided: np.ndarray | None = None  # iterations before which it decides, bool ``[output - 1]``
    share: float = 1.0  # of the bytes of a token in the model's own cache type


def request(
    geometry: Geometry, prompt_tokens: int, output_tokens: int, kept: Kept = Kept()
) -> SearchDemand:  # fmt: skip
    """The demand of a plain request: a prompt, and tokens in HBM, all of them or those `kept`.

    It is what `arborsim.play.episode.record_demand` records of a linear search, in closed form: a
    recording would write each of 8,192 tokens into a trace first.  The first output token comes
    with the prompt, so there is one iteration less.
    """
    everything = prompt_tokens + 1 + np.arange(output_tokens - 1)  # tokens, in each iteration
    held = everything if kept.tokens is None else kept.tokens
    windowed = geometry.windowed(held)
    size = geometry.full_bytes_per_token * held + geometry.window_bytes_per_token * windowed
    size = (kept.share * size).astype(np.int64)
    seen = ATTENDED_UNITS * (geometry.full_layers * held + geometry.window_layers * windowed)
    known = {"sequences": np.ones_like(held), "read_bytes": size}
    known["hbm_bytes"] = size + geometry.state_bytes
    known["attended"] = seen
    if kept.decided is not None:
        known["decided"], known["examined"] = kept.decided.astype(np.int64), held * kept.decided
    if kept.share != 1.0:
        known["quantised_bytes"] = size
    nothing = np.zeros_like(held)
    fixed, linear = (
        np.stack([known.get(name, nothing) for name in names], axis=1) for names in (FIXED, LINEAR)
    )
    pieces = cut(fixed, linear)
    prompt_bytes = int(kept.share * (geometry.path_bytes(prompt_tokens) - geometry.state_bytes))
    prompt_bytes += geometry.state_bytes
    ops = [(Op.LEVEL, prompt_bytes, 0, 0), (Op.PREFILL, prompt_tokens, 0, 0)]
    ops += [(Op.DECODE, number, 0, 0) for number in range(len(pieces))]
    token_bytes = geometry.kv_bytes_per_token
    info = DemandInfo("", 0, kept.policy, "-", "stage", geometry.name, token_bytes)
    legs = np.zeros((0, len(LEG_COLUMNS)), dtype=np.int64)
    return SearchDemand(info, np.array(ops, dtype=np.int64), pieces, legs)


@dataclass(frozen=True)
class Simulated:
    """A run as it was played; means over requests, of the whole system."""

    ttft_s: float
    tpot_s: float
    tokens_per_s: float
    #: Share of the median request's time to first token that a request alone would not take. (The
    #: mean is no help: all clients start at once, so their first requests always queue.)
    queueing: float
    #: From a request to its last token: by `LATENCY_PERCENTILES` of all requests
    latency_s: tuple[float, ...] = ()


class _Setting(NamedTuple):
    """An engine for runs that differ in clients and measurements alone."""

    engine: ServingEngine
    outputs: list[int]  # tokens that outputs have; demands are every prompt with each of them
    alone_s: float  # of the median prompt, to the first token


def _setting(run: ServingRun, machine: ServedMachine) -> _Setting:
    prompts, outputs = lengths(run)
    pairs = product(prompts, outputs)
    demands = [request(machine.geometry, prompt, output) for prompt, output in pairs]
    engine = ServingEngine(demands, *machine)
    alone = engine.run(ClosedLoop(1, tuple(range(0, len(demands), len(outputs)))))
    return _Setting(engine, outputs, float(np.median(_first_s(alone))))


@lru_cache(maxsize=2)  # files list runs of one setting together
def _shared_setting(run: ServingRun) -> _Setting:
    return _setting(run, machine_of(run))


def play(run: ServingRun, machine: ServedMachine | None = None) -> Simulated:
    """Play a run, on its machine or another; a `UsageError` says why that cannot be done."""
    if machine is None:
        alike = replace(run, id="", measured="x" * bool(run.measured), ttft_ms=1.0, tpot_ms=1.0)
        setting = _shared_setting(replace(alike, concurrency=1, concurrency_client=0))
    else:
        setting = _setting(run, machine)
    engine, outputs, alone_s = setting
    count = REQUESTS_PER_CLIENT * run.concurrency
    drawn = np.random.default_rng(SEED).integers(0, len(engine.demands), count).tolist()
    report = engine.run(ClosedLoop(run.concurrency, tuple(drawn)))
    if refused := next((each.refused for each in report.searches if each.refused), ""):
        raise UsageError(f"a request does not fit: {refused}")
    first_s = _first_s(report)
    tokens = [outputs[each.demand % len(outputs)] for each in report.searches]
    spent = [each.finish_s - each.prefilled_s for each in report.searches]
    return Simulated(
        float(np.mean(first_s)),
        float(np.mean([s / (n - 1) for s, n in zip(spent, tokens, strict=True)])),
        sum(tokens) / report.total_s,
        max(0.0, 1 - float(alone_s / np.median(first_s))),
        tuple(
            np.percentile(
                [each.finish_s - each.arrival_s for each in report.searches], LATENCY_PERCENTILES
            ).tolist()
        ),
    )


def _first_s(report: ServingReport) -> list[float]:
    """Times to first token."""
    return [each.prefilled_s - each.arrival_s for each in report.searches]


@dataclass(frozen=True)
class PlayedRun:
    """A published run, and what was simulated of it."""

    run: ServingRun
    simulated: Simulated | None
    reason: str = ""  #: why it could not be played
    odd: str = ""  #: why its measurements cannot be what they seem; "" if they can
    other: Prediction | NotPredicted | None = None  #: AIConfigurator's; None if it was not asked

    @property
    def side(self) -> str:
        return "fitted" if self.run.fitted else "judged"

    @property
    def measured_tokens_per_s(self) -> float:
        return measured_tokens_per_s(self.run)

    @property
    def queues(self) -> bool:
        """Whether much of its time to first token is waiting for others."""
        return self.simulated is None or self.simulated.queueing >= LITTLE_QUEUEING

    @property
    def tpot_error(self) -> float:
        """Simulated over measured, less one, as the others; NaN if it was not played."""
        return self._error(lambda made: 1e3 * made.tpot_s / self.run.tpot_ms)

    @property
    def ttft_error(self) -> float:
        return self._error(lambda made: 1e3 * made.ttft_s / self.run.ttft_ms)

    @property
    def throughput_error(self) -> float:
        return self._error(lambda made: made.tokens_per_s / self.measured_tokens_per_s)

    @property
    def other_error(self) -> float:
        """AIConfigurator's of the time per output token; NaN if it gave none."""
        if not isinstance(self.other, Prediction):
            return math.nan
        return 1e3 * self.other.tpot_s / self.run.tpot_ms - 1

    def _error(self, ratio: Callable[[Simulated], float]) -> float:
        return math.nan if self.simulated is None else ratio(self.simulated) - 1


@dataclass(frozen=True)
class KeptRun:
    """Figures of one run, as `ComparisonLog` keeps them."""

    number: int
    simulated: Simulated | None
    reason: str
    predicted: tuple[float, ...]  #: AIConfigurator's figures; none if it gave none
    refused: str | None  #: why it gave none; None if it did, or was not asked

    @classmethod
    def of(cls, number: int, played: PlayedRun) -> KeptRun:
        other = played.other
        predicted = tuple(other) if isinstance(other, Prediction) else ()
        refused = other.reason if isinstance(other, NotPredicted) else None
        return cls(number, played.simulated, played.reason, predicted, refused)

    def played(self, run: ServingRun) -> PlayedRun:
        other = Prediction(*self.predicted) if self.predicted else None
        refused = None if self.refused is None else NotPredicted(self.refused)
        return PlayedRun(run, self.simulated, self.reason, oddness(run), other or refused)


def compare(run: ServingRun, ask: bool = False) -> PlayedRun:
    """Play a run and compare; with `ask`, AIConfigurator is asked as well."""
    other = predicted(run) if ask else None
    try:
        return PlayedRun(run, play(run), "", oddness(run), other)
    except UsageError as error:
        return PlayedRun(run, None, str(error), oddness(run), other)


def compare_asking(run: ServingRun) -> PlayedRun:
    """`compare` with AIConfigurator, for worker processes."""
    return compare(run, ask=True)


def measured_tokens_per_s(run: ServingRun) -> float:
    """Output tokens per second of the measured run, by Little's law."""
    output = float(np.mean(lengths(run)[1]))
    return run.concurrency * output / (run.ttft_ms + run.tpot_ms * (output - 1)) * 1e3


def oddness(run: ServingRun) -> str:
    """Why a run cannot be what its row says; "" if it can, or the model or GPU is unknown."""
    try:
        profile, geometry, options = machine_of(run)
    except UsageError:
        return ""
    if run.tensor_parallel > GPUS_OF_A_NODE:
        return f"{run.tensor_parallel} GPUs for one copy, of which a node has {GPUS_OF_A_NODE}"
    hbm_bytes = options.tensor_parallel * profile.hbm_bytes
    if geometry.weight_bytes > hbm_bytes:
        return (
            f"weights of {geometry.weight_bytes / 1e9:.0f} GB alone exceed the "
            f"{hbm_bytes / 1e9:.0f} GB of its GPUs"
        )
    prompt, output = (float(np.mean(each)) for each in lengths(run))
    prompts_per_s = measured_tokens_per_s(run) / output
    flops_per_s = 2 * geometry.active_parameters * prompt * prompts_per_s
    peak = options.tensor_parallel * profile.flops_per_s * _PEAKS[run.weights]
    if flops_per_s > MOST_OF_PEAK * peak:
        return (
            f"its prompts alone would take {flops_per_s / peak:.0%} of its GPUs' peak: perhaps "
            "prefixes were cached"
        )
    return ""
