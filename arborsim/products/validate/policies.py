"""Policies on engines, played on the simulated server that plans use, next to full retention.

Both arms of a row are played as the row says: all requests of a closed loop at 0, lengths as
stated, the row's pool of KV where it is known.  A policy with a budget and a buffer cuts its cache
to the budget whenever `buffer` tokens have been generated and it holds both; what that takes is the
engine's (`arborsim.machine.integration`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.core.geometry import Geometry
from arborsim.machine.clock import Command
from arborsim.machine.config import with_kv_dtype
from arborsim.machine.integration import OTHER, Integration
from arborsim.machine.lookup import engine_names, load_geometry, load_profile
from arborsim.machine.machine import ServingOptions
from arborsim.machine.profile import HardwareProfile
from arborsim.machine.program import SearchDemand
from arborsim.machine.report import ServingReport
from arborsim.machine.scheduler import ClosedLoop
from arborsim.machine.server import Server
from arborsim.machine.serving import ServingEngine, play_closed_form
from arborsim.machine.weights import with_weights
from arborsim.products.validate.policy_runs import PolicyRun
from arborsim.products.validate.published import Kept, request

#: What a row measures, for engines that decode a fixed batch: its decode iterations alone.
_BATCHES = ("transformers", "flashinfer")
_MEMORY = re.compile(r"-(\d+)GB$", re.IGNORECASE)
#: Lengths of answers: their spread over their mean, and how many stand for the distribution.
#: 4, 62 and 293 cuts of 200 answers of 110 tokens at 256, 128 and 64 tokens each tell the spread.
ANSWER_SPREAD, _LENGTHS = 0.45, 8
_GIB = 2**30
#: Effects below this share are ties: their sign is not judged.
SMALLEST_EFFECT = 0.05
SEED = 0


@dataclass(frozen=True)
class SimulatedArm:
    """One arm as it was played."""

    tokens_per_s: float
    #: Requests in flight at most, as the engine's log would show it (`EngineProfile.log_s`)
    peak_concurrency: int
    preemptions: int
    peak_mem_gib: float  #: weights, workspace, and keys and values at their peak
    decisions: int


@dataclass(frozen=True)
class PlayedPolicy:
    """A row, and what was simulated of it."""

    run: PolicyRun
    policy: SimulatedArm | None = None
    baseline: SimulatedArm | None = None
    reason: str = ""  #: why it was not played
    open: str = ""  #: what the row leaves open, and how it was played

    @property
    def side(self) -> str:
        return "fitted" if self.run.fitted else "judged"

    @property
    def ratio(self) -> float:
        """Simulated throughput of the policy over that of full retention."""
        if self.policy is None or self.baseline is None:
            return math.nan
        return self.policy.tokens_per_s / self.baseline.tokens_per_s

    @property
    def error(self) -> float:
        """Error of the ratio: simulated over measured, less 1."""
        return self.ratio / self.run.ratio - 1

    @property
    def sign(self) -> bool | None:
        """Whether the policy is faster or slower as measured; None where that is not judged."""
        measured = self.run.ratio
        if math.isnan(self.error) or abs(measured - 1) <= SMALLEST_EFFECT:
            return None
        return (self.ratio > 1) == (measured > 1)


@dataclass(frozen=True)
class KeptPolicy:
    """Figures of one row, as `ComparisonLog` keeps them."""

    number: int
    policy: SimulatedArm | None
    baseline: SimulatedArm | None
    reason: str
    open: str

    @classmethod
    def of(cls, number: int, played: PlayedPolicy) -> KeptPolicy:
        return cls(number, played.policy, played.baseline, played.reason, played.open)

    def played(self, run: PolicyRun) -> PlayedPolicy:
        return PlayedPolicy(run, self.policy, self.baseline, self.reason, self.open)


def compare(run: PolicyRun) -> PlayedPolicy:
    """Play both arms of a row; the result says why not, where that cannot be done."""
    try:
        setting = Setting(run)
        baseline, policy = setting.play(True), setting.play(False)
    except UsageError as error:
        return PlayedPolicy(run, reason=str(error))
    return PlayedPolicy(run, policy, baseline, open="; ".join(setting.open))


class Setting:
    """Model, GPU, engine and load of a row; `open` says what it leaves open."""

    def __init__(self, run: PolicyRun) -> None:
        self.run = run
        engine, self.open = run.text("engine"), list[str]()
        if engine not in engine_names():
            raise UsageError(f"engine {engine or 'not stated'}: nothing is known of it")
        prompt, output = run.number("prompt_tokens"), run.number("output_tokens")
        if math.isnan(prompt) or math.isnan(output) or output < 2:
            raise UsageError("the lengths of prompts and outputs are not stated")
        if run.text("pairing") == "not-full-retention":
            raise UsageError("it is compared with something else than full retention")
        self.prompt = max(1, round(prompt))
        self.geometry = load_geometry(run.text("model").rpartition("/")[2])
        if run.text("dtype") == "fp8":
            self.geometry = with_weights(self.geometry, "fp8")
        self.profile = load_profile(_MEMORY.sub(_gpu, run.text("gpu")), engine=engine)
        gpus = run.number("tensor_parallel", "gpus")
        self.gpus = 1 if math.isnan(gpus) else max(1, round(gpus))
        if self.profile.hbm_bytes * self.gpus < self.geometry.weight_bytes:
            raise UsageError(f"{run.text('model')} does not fit {self.gpus} x {run.text('gpu')}")

    def play(self, baseline: bool) -> SimulatedArm:
        """Play full retention, or the policy."""
        run, geometry = self.run, self.geometry
        outputs, kept = self._outputs(baseline), [Kept()]
        if not baseline:
            geometry = self._geometry()
            kept = [self._kept(output) for output in outputs]
        pairs = zip(outputs, kept if len(kept) > 1 else kept * len(outputs), strict=True)
        demands = [request(geometry, self.prompt, *pair) for pair in pairs]
        if run.caches_prefixes(baseline):
            demands = [self._with_prefix(demand) for demand in demands]
        requests, concurrency = self._load(baseline)
        engine = ServingEngine(
            demands,
            self._profile(baseline, kept[0].policy),
            geometry,
            ServingOptions(preemption="recompute", tensor_parallel=self.gpus),
            kv_bytes=self._kv_bytes(geometry, kept[-1], baseline),
        )
        drawn = np.random.default_rng(SEED).permutation(np.arange(requests) % len(demands))
        seen = _Running(self.profile.engine.log_s if self.profile.engine else 0.0)
        report = engine.run(
            ClosedLoop(concurrency, tuple(drawn.tolist())), partial(play_closed_form, watch=seen)
        )
        if refused := next((each.refused for each in report.searches if each.refused), ""):
            raise UsageError(f"a request does not fit: {refused}")
        cuts = [0 if each.decided is None else int(each.decided.sum()) for each in kept]
        pool = report.pool
        used = pool.weight_bytes + pool.workspace_bytes + report.peak_hbm_bytes
        return SimulatedArm(
            sum(outputs[each] for each in drawn) / _seconds(report, run.text("engine") in _BATCHES),
            seen.peak(report.total_s),
            report.preemptions,
            used / _GIB,
            sum(cuts[each % len(cuts)] for each in drawn),
        )

    def _outputs(self, baseline: bool) -> list[int]:
        """Lengths of outputs, each equally often."""
        own = "baseline_avg_output_tokens" if baseline else "avg_output_tokens"
        mean = self.run.number(own, "output_tokens")
        if self.run.fixed_lengths:
            return [max(2, round(mean))]
        sigma = math.sqrt(math.log(1 + ANSWER_SPREAD**2))
        middles = (np.arange(_LENGTHS) + 0.5) / _LENGTHS
        lengths = np.exp(sigma * np.array([NormalDist().inv_cdf(each) for each in middles]))
        return [max(2, round(each)) for each in (mean * lengths / lengths.mean()).tolist()]

    def _with_prefix(self, demand: SearchDemand) -> SearchDemand:
        shared = int(self.run.shared * self.prompt)
        if not shared:
            raise UsageError("which tokens its prompts have in common is not stated")
        return replace(demand, info=replace(demand.info, prefix="shared", prefix_tokens=shared))

    def _load(self, baseline: bool) -> tuple[int, int]:
        """Requests, and how many of them at once."""
        requests, at_once = self.run.number("requests"), self.run.number("concurrency")
        if self.run.text("pairing") == "own-best-batch":
            own = "baseline_peak_concurrency" if baseline else "peak_concurrency"
            at_once = self.run.number(own, "concurrency")
            requests = at_once
        if math.isnan(at_once):
            raise UsageError("how many requests run at once is not stated")
        at_once = max(1, round(at_once))
        return at_once if math.isnan(requests) else max(1, round(requests)), at_once

    def _geometry(self) -> Geometry:
        """The model with the policy's cache."""
        return with_kv_dtype(self.geometry, "fp8") if self.run.bits == 8 else self.geometry

    def _kept(self, output: int) -> Kept:
        """Tokens that the policy keeps."""
        run, bits = self.run, self.run.bits
        if bits == 8 or run.policy == "prefix-cache":
            return Kept()
        if not math.isnan(bits):
            return Kept(run.policy, share=bits / 16)
        budget, buffer = run.number("budget_tokens"), run.number("buffer_tokens")
        if math.isnan(budget) or budget < 1:
            raise UsageError("its budget in tokens is not stated")
        if math.isnan(buffer):
            self._left_open("no buffer is stated: it decides with every token")
        tokens, decided = sawtooth(
            self.prompt, output, round(budget), 1 if math.isnan(buffer) else max(1, round(buffer))
        )
        return Kept(run.policy, tokens, decided)

    def _left_open(self, what: str) -> None:
        if what not in self.open:
            self.open.append(what)

    def _profile(self, baseline: bool, built: str) -> HardwareProfile:
        """The GPU under the engine as this arm ran it, with a policy that is `built` into it."""
        run, profile = self.run, self.profile
        engine = profile.engine
        assert engine is not None
        changes: dict[str, Any] = {"asynchronous": not run.synchronous(baseline)}
        if graphs := run.graphs(baseline):
            changes["graphs"] = graphs
        if built == "full":  # full retention, also in a cache of another type
            arm, layers = replace(Integration(), **changes), self.geometry.layers
            longer_s = engine.layer_s + engine.lost_s(arm, layers)
            return replace(profile, engine=replace(engine, layer_s=longer_s))
        known = engine.integrations
        if built not in known:
            self._left_open(f"no build of {built} was measured: priced from its operations")
        arm = replace(known.get(built, known.get(OTHER, Integration())), **changes)
        return replace(profile, engine=replace(engine, integrations={**known, built: arm}))

    def _kv_bytes(self, geometry: Geometry, kept: Kept, baseline: bool) -> int | None:
        """The arm's pool of keys and values; None where the machine's own is taken."""
        run = self.run
        token_bytes = kept.share * geometry.kv_bytes_per_token
        own = run.number("baseline_kv_pool_tokens" if baseline else "kv_pool_tokens")
        if not math.isnan(own):
            if own < 1:
                raise UsageError("its pool is empty: the engine does not start")
            return int(own * token_bytes)
        other = run.number("kv_pool_tokens" if baseline else "baseline_kv_pool_tokens")
        if math.isnan(other):
            self._left_open("no pool is stated: that of the GPU")
            return None
        pool = int(other * self.geometry.kv_bytes_per_token)
        engine = self.profile.engine
        built = None if engine is None or baseline else engine.integrations.get(run.policy)
        if built is not None and kept.tokens is not None:
            pool -= built.pool_bytes(geometry, float(kept.tokens[-1]), pool)
        return pool


def sawtooth(prompt: int, output: int, budget: int, buffer: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens held in each iteration, and iterations before which the cache is cut to the budget.

    A cut needs `buffer` tokens since the last one, or since the prompt, and `budget` and `buffer`
    held.  int64 and bool ``[output - 1]``.
    """
    tokens = np.empty(output - 1, dtype=np.int64)
    decided = np.zeros(output - 1, dtype=bool)
    held, since = prompt + 1, 1
    for i in range(output - 1):
        if since > buffer and held > budget + buffer:
            held, since, decided[i] = budget + 1, 1, True
        tokens[i] = held
        held, since = held + 1, since + 1
    return tokens, decided


class _Running:
    """Requests in flight, at the moments at which an engine logs them."""

    def __init__(self, log_s: float) -> None:
        self._log_s = log_s
        self._times: list[float] = []
        self._counts: list[int] = []

    def __call__(self, server: Server, command: Command, began_s: float) -> bool:
        self._times.append(server.state.clock.now)
        self._counts.append(len(server.state.resident))
        return False

    def peak(self, total_s: float) -> int:
        """The most of them; of a run without a line in its log, the most at any moment."""
        counts = np.array(self._counts)
        if not self._log_s or total_s <= self._log_s:
            return int(counts.max())
        at = np.searchsorted(self._times, np.arange(self._log_s, total_s, self._log_s)) - 1
        return int(counts[np.maximum(at, 0)].max())


def _seconds(report: ServingReport, decoding: bool) -> float:
    """Seconds of the run, or of its decode iterations alone."""
    if not decoding:
        return report.total_s
    return report.total_s - max(each.prefilled_s for each in report.searches)


def _gpu(found: re.Match[str]) -> str:
    """GPUs of one name and several sizes keep the size; others have none in their names."""
    return f"-{found[1]}" if found[1] in ("40", "80") and "A100" in found.string else ""
