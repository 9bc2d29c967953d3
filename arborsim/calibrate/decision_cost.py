"""What a policy's decision takes on this host: a fixed part, and a part per token.

Real policies decide over views of several sizes whose scores are random numbers.  The views hold
one chain, all of it in HBM, with more tokens than the budget allows; what is timed is
`Policy.decide`, from view to plan, and `Policy.decide_run`, per iteration, where there is one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls

from arborsim.calibrate.backend import OnProgress
from arborsim.core.errors import ArborsimError
from arborsim.core.events import Decode, Event, Prefill, TokenRun
from arborsim.core.observations import DenseRows, Observations, Signal
from arborsim.core.tree import ThoughtTree
from arborsim.policies.base import CacheView, Policy
from arborsim.policies.registry import available, build
from arborsim.signals.scores import ScoreBook
from arborsim.trace.schema import PER_LAYER

SIZES = (1024, 4096, 16384)
QUICK_SIZES = (512, 2048)
_PROMPT, _RUN = 256, 64
_LAYERS, _KV_HEADS, _HEADS, _HEAD_DIM = 4, 4, 8, 64
GROUPS = {"shared": 1, "layer": _LAYERS, "head": _LAYERS * _KV_HEADS}
_FEW = 11  # tokens; no other axis of a score has this size
_INTERVAL = 128  # policies that decide at intervals do so at a multiple of this
_REPEATS = 7
_LIMIT_S = 0.2  # per policy and size; a size four times as large is left out then


@dataclass(frozen=True)
class DecisionCost:
    """Medians over the policies, and each policy's own numbers.

    Attributes
    ----------
    base_s, per_token_s : float
        The cost model's ``decision_base_s`` and ``decision_per_token_s``.
    policies : mapping of name to tuple of float
        Base and seconds per token of each.
    sizes : tuple of int
        Tokens of the views.
    run_s : float
        Median seconds per iteration where runs are decided at once, at the largest size; NaN if no
        policy does.
    """

    base_s: float
    per_token_s: float
    policies: Mapping[str, tuple[float, float]]
    sizes: tuple[int, ...]
    run_s: float


def measure_decisions(
    quick: bool, on_progress: OnProgress, names: Iterable[str] | None = None
) -> DecisionCost:
    """Time decisions of the policies called `names`; by default of all that are installed."""
    sizes = QUICK_SIZES if quick else SIZES
    chosen = list(available() if names is None else names)
    found: dict[str, tuple[float, float]] = {}
    runs: list[float] = []
    for i, name in enumerate(chosen):
        on_progress("timing decisions", i, len(chosen))
        policy = build(name)
        taken = list(_decisions(policy, sizes))
        if len(taken) < 2:
            continue  # it decides at other events, or is far too slow to say per token
        found[name] = _line(*zip(*taken, strict=True))
        if policy.plans_runs(chain_view(policy, sizes[-1])):
            runs.append(_run_s(policy, sizes[-1]))
    on_progress("timing decisions", len(chosen), len(chosen))
    base, slope = (float(np.median([each[i] for each in found.values()])) for i in (0, 1))
    return DecisionCost(base, slope, found, sizes, statistics.median(runs or [float("nan")]))


def chain_view(policy: Policy, tokens: int, over: int = 1) -> CacheView:
    """All tokens of one chain in HBM, `over` more than the budget allows; random scores."""
    tree = ThoughtTree()
    tree.open(0, -1)
    tree.append((0,), _PROMPT)
    tree.open(1, 0)
    tree.append((1,), tokens - _PROMPT)
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
    )


class _FewRows:
    """Rows of layers and heads for `_FEW` tokens: enough to see what shape a score has."""

    layers = tuple(range(_LAYERS))
    kv_heads = _KV_HEADS

    def row(self, i: int) -> np.ndarray:
        return np.full((_LAYERS, _HEADS, i + 1), 1 / (i + 1), dtype=np.float32)

    def of(self, i: int) -> np.ndarray:
        return np.full((_LAYERS, 2, i + 1), 1 / (i + 1), dtype=np.float16)

    def query(self, i: int) -> np.ndarray:
        return np.ones((_LAYERS, _HEADS, _HEAD_DIM), dtype=np.float32)

    def __getitem__(self, tokens: slice) -> _FewRows:
        return self


def random_scores(policy: Policy, tokens: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random numbers in the shapes that the policy's scores have after so many tokens."""
    rows = [np.full(i + 1, 1 / (i + 1)) for i in range(_FEW)]
    vectors = rng.random((_FEW, _LAYERS, _KV_HEADS, _HEAD_DIM)).astype(np.float16)
    per_layer: dict[Any, Any] = {
        signal: rng.random((_FEW, _LAYERS)).astype(np.float16) for signal in PER_LAYER
    }
    few: Any = _FewRows()
    observed = Observations(
        _FEW,
        DenseRows(np.concatenate(rows), np.cumsum([0, *map(len, rows)])),
        {
            **per_layer,
            Signal.KEY_SKETCH: rng.random((_FEW, 16)).astype(np.float16),
            Signal.EVICTION_TIME: rng.random(_FEW),
        },
        few, few, vectors, vectors,
    )  # fmt: skip
    tree = ThoughtTree()
    tree.open(0, -1)
    tree.append((0,), _FEW)
    run = TokenRun((0,), _FEW, np.zeros(_FEW, dtype=np.int32), observed)
    book = ScoreBook(policy.scores(), _LAYERS)
    book.begin(run, tree, generated=False)
    book.skip(_FEW)
    return {
        name: rng.random([tokens if n == _FEW else n for n in seen.shape]).astype(seen.dtype)
        for name, seen in book.values().items()
    }


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
    """Whether there is anything to decide; tree policies pin a chain's one block whole."""
    try:
        return policy.decide(view, event) is not None
    except ArborsimError:
        return False


def _run_s(policy: Policy, tokens: int) -> float:
    """Seconds per iteration of a run that ends with the view."""
    run = TokenRun((1,), _RUN, np.zeros(_RUN, dtype=np.int32), Observations(_RUN))
    view = chain_view(policy, tokens, over=_RUN)
    return _median_s(lambda: policy.decide_run(view, run, iter(range(_RUN)))) / _RUN


def _median_s(work: Callable[[], Any]) -> float:
    """CPU time of the thread: other processes do not lengthen it."""
    taken: list[float] = []
    while len(taken) < _REPEATS and sum(taken) < _LIMIT_S:
        began = time.thread_time()
        work()
        taken.append(time.thread_time() - began)
    return statistics.median(taken)


def _line(tokens: tuple[int, ...], seconds: tuple[float, ...]) -> tuple[float, float]:
    """Base and slope, neither negative, of least relative errors."""
    t = np.asarray(seconds)
    rows = np.stack([1 / t, np.asarray(tokens) / t], axis=1)
    scale = rows.max(axis=0)
    x, _ = nnls(rows / scale, np.ones(len(t)))
    return float(x[0] / scale[0]), float(x[1] / scale[1])
