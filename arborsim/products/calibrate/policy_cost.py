"""The cost of policies: their decisions alone on this host, and all of it in live searches.

*Decisions*: real policies decide over views of several sizes whose scores are random numbers.  The
views hold one chain, all of it in HBM, with more tokens than the budget allows.  What is timed is
`Policy.decide`, from view to plan, and `Policy.decide_run`, per iteration, where there is one.

*Searches*: a live search takes signals off the model, keeps scores up to date, lets the controller
make a plan and moves tensors.  For a policy that was timed, the profile says what an iteration, a
turn to other thoughts, a sequence of either, and a decision take (`seconds_of`).  For one that was
not, all of it is charged per decision, as a median over the others. What attention takes longer
where its rows are wanted is found per layer of an iteration (`fit_policies`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from arborsim.core.errors import ArborsimError
from arborsim.core.events import Decode, Event, Prefill, TokenRun
from arborsim.core.head_rows import VectorRows
from arborsim.core.observations import DenseRows, HiddenRows, LayerRows, Observations, Signal
from arborsim.core.shape import CacheShape, Rope
from arborsim.core.statistics import nonnegative_least_squares
from arborsim.core.tree import ThoughtTree
from arborsim.machine.integration import PolicySeconds
from arborsim.policies.base import CacheView, Policy
from arborsim.policies.registry import available, build
from arborsim.products.calibrate.backend import OnProgress, PolicyTime, Quiet
from arborsim.signals.pages import PageBounds, PageOf
from arborsim.signals.scores import Readers, Score, ScoreBook, Steps
from arborsim.trace.schema import PER_LAYER

SIZES = (1024, 4096, 16384)
QUICK_SIZES = (512, 2048)
_PROMPT, _RUN = 256, 64
_LAYERS, _KV_HEADS, _HEADS, _HEAD_DIM = 4, 4, 8, 64
GROUPS = {"shared": 1, "layer": _LAYERS, "head": _LAYERS * _KV_HEADS}
SHAPE = CacheShape(tuple(range(_LAYERS)), _KV_HEADS, _HEAD_DIM, Rope((1.0,) * (_HEAD_DIM // 2)))
_FEW = 11  # tokens; no other axis of a score has this size
_READERS = 4  # the step after a token and those that read it
_INTERVAL = 128  # policies that decide at intervals do so at a multiple of this
_REPEATS = 7
_LIMIT_S = 0.2  # per policy and size; a size four times as large is left out then


@dataclass(frozen=True)
class DecisionCost:
    """Medians over the policies, and each policy's own numbers."""

    #: The cost model's ``decision_base_s`` and ``decision_per_token_s``
    base_s: float
    per_token_s: float
    policies: Mapping[str, tuple[float, float]]  # base and seconds per token of each
    sizes: tuple[int, ...]  # tokens of the views
    #: Median seconds per iteration where runs are decided at once, at the largest size; NaN if no
    #: policy does
    run_s: float


def measure_decisions(
    quick: bool, on_progress: OnProgress, names: Iterable[str] | None = None
) -> DecisionCost:
    """Time decisions of the policies called `names`. By default of all that are installed."""
    sizes = QUICK_SIZES if quick else SIZES
    chosen = list(available() if names is None else names)
    found: dict[str, tuple[float, float]] = {}
    runs: list[float] = []
    for i, name in enumerate(chosen):
        on_progress("timing decisions", i, len(chosen))
        policy = build(name)
        taken = list(_decisions(policy, sizes))
        if len(taken) < 2:
            continue  # it decides at other events, or is far too slow at the next size
        found[name] = _relative_line(*zip(*taken, strict=True))
        if policy.plans_runs(chain_view(policy, sizes[-1])):
            runs.append(_run_s(policy, sizes[-1]))
    on_progress("timing decisions", len(chosen), len(chosen))
    base, slope = (float(np.median([each[i] for each in found.values()])) for i in (0, 1))
    return DecisionCost(base, slope, found, sizes, statistics.median(runs or [float("nan")]))


def chain_view(policy: Policy, tokens: int, over: int = 1) -> CacheView:
    """All tokens of one chain in HBM, `over` more than the budget allows. Random scores."""
    tree = _chain(_PROMPT, tokens - _PROMPT)
    tree.activate((1,))
    return CacheView(
        tier=np.zeros((GROUPS[policy.grouping], tokens), dtype=np.int8),
        scores=random_scores(policy, tokens, np.random.default_rng(0)),
        tree=tree,
        leaves=(1,),
        prompt_tokens=_PROMPT,
        budget_tokens=tokens - over,
        iterations=tokens - tokens % _INTERVAL,
        vocabulary=128_256,
        shape=SHAPE,
    )


def _chain(*tokens: int) -> ThoughtTree:
    """A chain of blocks with these numbers of tokens."""
    tree = ThoughtTree()
    for node, count in enumerate(tokens):
        tree.open(node, node - 1)
        tree.append((node,), count)
    return tree


def random_scores(policy: Policy, tokens: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random numbers in the shapes that the policy's scores have after `tokens` tokens."""
    lengths = np.arange(_FEW + 1)
    ends = np.cumsum(lengths)
    vectors = rng.random((_FEW, _LAYERS, _KV_HEADS, _HEAD_DIM)).astype(np.float16)
    queries = np.ones((_FEW, _LAYERS, _HEADS, _HEAD_DIM), dtype=np.float16)
    layer_ends, root, order = 2 * _LAYERS * ends, np.zeros(1, dtype=np.int32), np.arange(_FEW)
    per_layer: dict[Any, Any] = {
        signal: rng.random((_FEW, _LAYERS)).astype(np.float16) for signal in PER_LAYER
    }
    per_token = per_layer | {
        Signal.KEY_SKETCH: rng.random((_FEW, 16)).astype(np.float16),
        Signal.EVICTION_TIME: rng.random((_FEW, GROUPS[policy.grouping])),
        Signal.READERS: np.zeros((_FEW, _READERS), dtype=np.int32),
    }
    layers = tuple(range(_LAYERS))
    observed = Observations(
        _FEW,
        DenseRows(1 / np.repeat(lengths, lengths), ends),
        per_token,
        LayerRows(layers, np.ones(layer_ends[-1], dtype=np.float16), layer_ends),
        VectorRows(queries, vectors, order, np.zeros_like(order), root, root - 1, SHAPE.rope),
        vectors,
        vectors,
        HiddenRows(layers, vectors.reshape(_FEW, _LAYERS, -1)),
    )
    run = TokenRun((0,), _FEW, np.zeros(_FEW, dtype=np.int32), observed)
    book = ScoreBook(policy.scores(), _LAYERS)
    book.begin(run, _chain(_FEW), generated=False)
    book.skip(_FEW)
    made = {
        name: rng.random([tokens if n == _FEW else n for n in seen.shape]).astype(seen.dtype)
        for name, seen in book.values().items()
    }
    for name, score in policy.scores().items():
        if isinstance(score, PageOf | PageBounds):  # not numbers of tokens
            made[name] = _of_pages(score, tokens, rng)
        elif isinstance(score, Readers):  # whole numbers
            made[name] = rng.integers(0, 2 * _READERS, (1, tokens, _READERS), dtype=np.int32)
    return made


def _of_pages(score: Score, tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Values of pages after random keys of `tokens` tokens."""
    keys = rng.random((tokens, _LAYERS, _KV_HEADS, _HEAD_DIM)).astype(np.float16)
    observed = Observations(tokens, keys=keys)
    state = score.start(_LAYERS)
    run = TokenRun((0,), tokens, np.zeros(tokens, dtype=np.int32), observed)
    state.begin(run, _chain(tokens), generated=False)
    return state.values


def _decisions(policy: Policy, sizes: Iterable[int]) -> Iterable[tuple[int, float]]:
    """Sizes and seconds, as far as decisions are made and do not take too long."""
    run = TokenRun((1,), 1, np.zeros(1, dtype=np.int32), Observations(1))
    for tokens in sizes:
        view = chain_view(policy, tokens)
        event = next((e for e in (Decode(run), Prefill(run)) if _decides(policy, view, e)), None)
        if event is None:
            return
        seconds = _median_s(lambda e=event, v=view: policy.decide(v, e))  # type: ignore[misc]
        yield tokens, seconds
        if seconds > _LIMIT_S:
            return


def _decides(policy: Policy, view: CacheView, event: Event) -> bool:
    """Whether there is anything to decide. Tree policies pin a chain's one block whole."""
    try:
        return policy.decide(view, event) is not None
    except ArborsimError:
        return False


def _run_s(policy: Policy, tokens: int) -> float:
    """Seconds per iteration of a run that ends with the view."""
    run = TokenRun((1,), _RUN, np.zeros(_RUN, dtype=np.int32), Observations(_RUN))
    view = chain_view(policy, tokens, over=_RUN)
    return _median_s(lambda: policy.decide_run(view, run, Steps((), _RUN))) / _RUN


def _median_s(work: Callable[[], Any]) -> float:
    """CPU time of the thread: other processes do not lengthen it."""
    taken: list[float] = []
    while len(taken) < _REPEATS and sum(taken) < _LIMIT_S:
        began = time.thread_time()
        work()
        taken.append(time.thread_time() - began)
    return statistics.median(taken)


def _relative_line(tokens: tuple[int, ...], seconds: tuple[float, ...]) -> tuple[float, float]:
    """Base and slope, neither negative, of least relative errors."""
    t = np.asarray(seconds)
    rows = np.stack([1 / t, np.asarray(tokens) / t], axis=1)
    scale = rows.max(axis=0)
    x = nonnegative_least_squares(rows / scale, np.ones(len(t)))
    return float(x[0] / scale[0]), float(x[1] / scale[1])


def fit_policies(times: Sequence[PolicyTime]) -> dict[str, float]:
    """Fields of a `HardwareProfile`, medians over policies.

    Empty without both a policy that reads attention and one that does not.
    Policies that rarely decide say little about a decision. Those that round tokens read them more
    slowly whether or not they need rows.  Trees count for their policies alone.
    """
    times = [one for one in times if one.lanes == 1]
    often = [one for one in times if one.decides_often]
    blind, seeing = ([one for one in often if one.rows == rows] for rows in (False, True))
    if not blind or not seeing:
        return {}
    base_s, per_token_s = _line(blind)
    rows_s = _median(one.decision_s - base_s - per_token_s * one.tokens for one in seeing)
    slower_s = _median(one.layer_s for one in times if one.rows and not one.quantises)
    return {
        "decision_base_s": base_s,
        "decision_per_token_s": per_token_s,
        "decision_rows_s": max(0.0, rows_s),
        "eager_per_layer_s": max(0.0, slower_s),
    }


def seconds_of(
    times: Sequence[PolicyTime], decisions: Mapping[str, tuple[float, float]]
) -> dict[str, PolicySeconds]:
    """Seconds of each policy that was also timed without decisions, in order of the timing.

    `decisions` holds base and seconds per token of `Policy.decide` alone: for policies that hardly
    ever decided, whose searches say little about a decision.  Those that decide on trees only are
    not in it.
    """
    by_name = _grouped((one for one in times if one.quiet), "name")
    return {name: _own_seconds(each, decisions.get(name)) for name, each in by_name.items()}


def _grouped(records: Iterable[Any], name: str) -> dict[Any, list[Any]]:
    """By the value of a field, in order of first appearance."""
    found: dict[Any, list[Any]] = {}
    for record in records:
        found.setdefault(getattr(record, name), []).append(record)
    return found


def _own_seconds(times: Sequence[PolicyTime], alone: tuple[float, float] | None) -> PolicySeconds:
    layer_s = max(0.0, _median(one.layer_s for one in times if one.lanes == 1))
    several = [one.layer_s for one in times[0].quiet if one.lanes > 1]
    quiet = replace(
        _quiet_seconds(times[0].quiet), layer_s=layer_s, wide_layer_s=max(0.0, _median(several))
    )

    def decision_s(one: PolicyTime) -> float:
        observing_s, turning_s = quiet.observing_s(one.lanes), quiet.turning_s(one.lanes)
        without_s = one.iterations * observing_s + one.turns * turning_s
        return max(0.0, one.policy_s - float(without_s)) / one.decisions

    said = [one for one in times if one.decides_often or (alone is None and one.decisions)]
    if not said:
        base_s, slope_s = alone or (0.0, 0.0)
        return replace(quiet, decision_base_s=base_s, decision_per_token_s=slope_s)
    taken = sorted((one.tokens, decision_s(one)) for one in said)
    (fewer, less_s), (more, more_s) = taken[0], taken[-1]
    slope_s = max(0.0, (more_s - less_s) / (more - fewer)) if more > fewer else 0.0
    base_s = float(np.mean([s - slope_s * tokens for tokens, s in taken]))
    return replace(quiet, decision_base_s=max(0.0, base_s), decision_per_token_s=slope_s)


def _quiet_seconds(quiet: Sequence[Quiet]) -> PolicySeconds:
    """Seconds of iterations and turns: over lengths of thoughts, then over sequences."""
    # A thought of n iterations spreads one turn over them: 1 / n turns per iteration.
    pairs = {
        lanes: _base_and_slope({1 / one.thought: one.per_iteration_s for one in each})
        for lanes, each in _grouped(quiet, "lanes").items()
    }
    (iteration_s, lane_s), (turn_s, turn_lane_s) = (
        _base_and_slope({lanes: pair[i] for lanes, pair in pairs.items()}) for i in (0, 1)
    )
    return PolicySeconds(iteration_s, lane_s, turn_s, turn_lane_s)


def _base_and_slope(seconds: Mapping[float, float]) -> tuple[float, float]:
    """Base and slope of the line through the first and the last point. Neither negative."""
    few, many = min(seconds), max(seconds)
    slope = max(0.0, (seconds[many] - seconds[few]) / (many - few)) if many > few else 0.0
    return max(0.0, seconds[few] - few * slope), slope


def _line(times: Sequence[PolicyTime]) -> tuple[float, float]:
    """Base and slope, neither negative: medians over policies, the slope over those timed twice."""
    pairs = [sorted(each, key=lambda one: one.tokens) for each in _grouped(times, "name").values()]
    per_token_s = _median(
        (each[-1].decision_s - each[0].decision_s) / (each[-1].tokens - each[0].tokens)
        for each in pairs
        if each[-1].tokens > each[0].tokens
    )
    per_token_s = max(0.0, per_token_s)
    base_s = _median(one.decision_s - per_token_s * one.tokens for one in times)
    return max(0.0, base_s), per_token_s


def _median(values: Iterable[float]) -> float:
    return float(np.median(list(values) or [0.0]))
