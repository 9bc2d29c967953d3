"""Searches of a known shape: what an iteration and a policy take in a live one.

The model draws random thoughts after a random prompt; what is timed is the whole search, with the
drawing of tokens, the bookkeeping of the tree and the turn from one thought to the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, ClassVar

import numpy as np

from arborsim.core.errors import ArborsimError
from arborsim.policies.methods.baselines import Full
from arborsim.policies.registry import available, build
from arborsim.products.calibrate.backend import PolicyTime, Quiet
from arborsim.searches import ROOT, Expansion, Leaf, Search, make_search
from arborsim_torch.batches import Ended, run_batched
from arborsim_torch.decoder import prefill_block
from arborsim_torch.hardware.timing import Timer
from arborsim_torch.live.policy_search import PolicySearch
from arborsim_torch.live.setup import CacheOptions, SearchSetup
from arborsim_torch.recording import EpisodeResult
from arborsim_torch.recording_plan import attention_top
from arborsim_torch.sources import RandomSource

THOUGHT = 8  # tokens, about what the reference tasks' thoughts have
_TEMPERATURE = 0.7
_NO_LIMIT = 1 << 40  # tokens
#: Tokens of the prompts over which policies are timed: what they take grows with these, and is
#: charged for prompts of tens of thousands of tokens on a GPU.
_PROMPTS = {"cpu": (96, 512), "cuda": (1024, 8192)}
#: Iterations of each search, and those of them that stay within the budget.
ITERATIONS, _FREE = 96, 48
#: The same of trees, for policies that take nothing from a chain.
_TREE_ITERATIONS, _TREE_FREE = 48, 136
#: Without a budget: sequences that decode together, tokens of a thought, and iterations.
_LANES, _LENGTHS, _QUIET_ITERATIONS = (1, 8), (8, 32), 64
_QUICK = ("h2o", "random", "streaming-llm")


class Fans(Search):
    """Opens n children of the prompt at once, drops them, and goes on to the next n."""

    name: ClassVar[str] = "fans"
    synchronous: ClassVar[bool] = True

    def __init__(self, fans: Sequence[int], late: Callable[[], bool]) -> None:
        self._fans, self._late = list(fans), late
        self._most = max(fans)

    @property
    def slots(self) -> int:
        return self._most

    def expand(self, frontier: Sequence[Leaf], width: int) -> Expansion:
        dropped = tuple(leaf.node for leaf in reversed(frontier) if leaf.node != ROOT)
        if not self._fans or self._late():
            return Expansion(dropped=dropped, done=True)
        return Expansion({ROOT: self._fans.pop(0)}, dropped)

    def answers(self, frontier: Sequence[Leaf]) -> tuple[int, ...]:
        return (ROOT,)


@dataclass(frozen=True)
class Fanned:
    """Seconds of a search in fans: of its prefill, and of a median iteration by lanes."""

    prefill_s: float
    iteration_s: dict[int, float]


def fanned(
    timer: Timer, model: Any, prompt: int, lanes: Sequence[int], thought: int, limit_s: float
) -> Fanned:
    """Time one; after `limit_s` no other number of lanes is begun, once there is one.

    A single lane is a chain, which may be read by faster means than what shares slots with others.
    """
    began, ends = time.perf_counter(), list[float]()
    several = [count for count in lanes if count > 1]
    fans = [*several[:1], *several]  # the first thought of all is not like the others
    late = lambda: len(ends) >= 2 * thought and time.perf_counter() - began > limit_s  # noqa: E731

    def timed(source: RandomSource, search: Callable[[], Any]) -> tuple[float, list[float]]:
        """Seconds of the prefill, and of a median iteration of every thought but the first."""
        ends.clear()
        setup = _setup(timer, model, source, search)
        _, ended = _run(setup, build("full"), _NO_LIMIT, lambda _: ends.append(timer.clock()))
        assert isinstance(ended, EpisodeResult)
        # A thought's first iteration also holds the turn to it, whose cost is the search's own.
        taken = np.median(np.diff(np.array(ends).reshape(-1, thought), axis=1), axis=1)[1:]
        return ended.prefill_s, taken.tolist()

    words, found = model.config.vocab_size, dict[int, float]()
    if 1 in lanes:  # its second thought is over a context as long as that of the others
        source = RandomSource(words, prompt - thought, 2 * thought, thought)
        prefill_s, (found[1],) = timed(source, lambda: make_search("linear"))
    if several:
        source = RandomSource(words, prompt, _NO_LIMIT, thought)
        prefill_s, taken = timed(source, lambda: Fans(fans, late))
        found |= zip(several, taken, strict=False)
    return Fanned(prefill_s, found)


def time_policies(
    timer: Timer,
    model: Any,
    quick: bool,
    limit_s: float,
    tell: Callable[[int, int], None],
    names: Sequence[str] = (),
) -> list[PolicyTime]:
    """One search per policy and prompt, and one under full retention; one warms up first."""
    chosen = names or (_QUICK if quick else _alternating(available()))
    began, found = time.perf_counter(), list[PolicyTime]()
    _time_policy(timer, model, "full", _prompts(timer)[0])
    for i, name in enumerate(["full", *chosen]):
        tell(i, len(chosen) + 1)
        if timer.device.type == "cuda":
            began += _compile(timer, model, name)
        quiet = _quiet(timer, model, name)
        own = _searches(timer, model, name) or _searches(timer, model, name, tree=True)
        found += [replace(one, quiet=quiet) for one in own]
        if time.perf_counter() - began > limit_s:
            break
    tell(1, 1)
    return found


def _prompts(timer: Timer) -> tuple[int, int]:
    return _PROMPTS[timer.device.type]


def _compile(timer: Timer, model: Any, name: str) -> float:
    """Short searches with decisions, so that no timed one compiles kernels; what they took."""
    began = time.perf_counter()
    prompt = _prompts(timer)[0]
    source = RandomSource(model.config.vocab_size, prompt, _NO_LIMIT, THOUGHT)
    for lanes in _LANES:
        setup = _setup(timer, model, source, partial(Fans, [lanes], lambda: False))
        with suppress(ArborsimError):
            _run(setup, build(name), prompt + THOUGHT // 2)
    return time.perf_counter() - began


def _searches(timer: Timer, model: Any, name: str, tree: bool = False) -> list[PolicyTime]:
    """Over prompts of both lengths, each after the same under full retention."""
    found = []
    for prompt in _prompts(timer):
        full = _time_policy(timer, model, "full", prompt, tree=tree)
        one = full if name == "full" else _time_policy(timer, model, name, prompt, full, tree)
        found += [] if one is None else [one]
    return found


def _alternating(names: Iterable[str]) -> list[str]:
    """Policies that read attention, and others, in turns: the time may not be enough for all."""
    kinds: tuple[list[str], list[str]] = [], []
    for name in names:
        policy = build(name)
        if not isinstance(policy, Full):
            kinds[policy.fused].append(name)
    longest = max(map(len, kinds))
    return [kind[i] for i in range(longest) for kind in kinds if i < len(kind)]


def _quiet(timer: Timer, model: Any, name: str) -> tuple[Quiet, ...]:
    """Searches whose budget holds everything, each after the same under full retention.

    None if the policy cannot search like this.
    """
    found, layers, prompt = [], model.config.num_hidden_layers, _prompts(timer)[0]
    for lanes, thought in product(_LANES, _LENGTHS):
        source = RandomSource(model.config.vocab_size, prompt, _NO_LIMIT, thought)
        fans = [lanes] * (_QUIET_ITERATIONS // thought)
        setup = _setup(timer, model, source, partial(Fans, fans, lambda: False))
        times, everything = [], prompt + sum(fans) * thought + _TREE_FREE
        iterations = len(fans) * thought
        for each in dict.fromkeys(("full", name)):
            try:
                search, ended = _run(setup, build(each), everything)
            except ArborsimError:
                return ()
            if not isinstance(ended, EpisodeResult):
                return ()
            times.append(search.outcome(ended).measured.time)
        full, own = times[0], times[-1]
        longer_s = (own.decode_s - full.decode_s) / (iterations * layers)
        found.append(Quiet(lanes, thought, own.policy_s / iterations, longer_s))
    return tuple(found)


def _time_policy(
    timer: Timer,
    model: Any,
    name: str,
    prompt: int,
    full: PolicyTime | None = None,
    tree: bool = False,
) -> PolicyTime | None:
    """On a chain, or a tree of eight branches; None if the policy cannot search like this."""
    policy = build(name)
    depth, free = (_TREE_ITERATIONS, _TREE_FREE) if tree else (ITERATIONS, _FREE)
    source = RandomSource(model.config.vocab_size, prompt, depth, THOUGHT)
    branching = partial(make_search, "tot-bfs", keep=2, children=4)
    search_of = branching if tree else partial(make_search, "linear")
    setup = _setup(timer, model, source, search_of)
    try:
        search, ended = _run(setup, policy, prompt + free)
    except ArborsimError:
        return None
    if not isinstance(ended, EpisodeResult):
        return None
    measured = search.outcome(ended).measured
    return PolicyTime(
        name,
        rows=not policy.fused,
        quantises=any(tier.quantised for tier in policy.tiers),
        layers=model.config.num_hidden_layers,
        tokens=prompt + (free if tree else (depth + free) / 2),
        iterations=ended.iterations,
        turns=depth // THOUGHT,
        lanes=measured.generated_tokens / ended.iterations,
        decisions=measured.decisions,
        decode_s=measured.time.decode_s,
        policy_s=measured.time.policy_s,
        full_decode_s=measured.time.decode_s if full is None else full.decode_s,
        full_policy_s=measured.time.policy_s if full is None else full.policy_s,
    )


def _setup(
    timer: Timer, model: Any, source: RandomSource, search: Callable[[], Any]
) -> SearchSetup:
    return SearchSetup(
        model,
        source,
        search,
        _TEMPERATURE,
        seed=0,
        max_tokens=source.max_tokens,
        dedupe=False,
        clock=timer.clock,
        prefill_block=prefill_block(timer.device),
        attention_top=attention_top(len(source.problem(0).prompt)),
    )


def _run(
    setup: SearchSetup,
    policy: Any,
    budget_tokens: int,
    on_tokens: Callable[[int], None] | None = None,
) -> tuple[PolicySearch, Ended]:
    machine, problem = CacheOptions("stage", overlap=False), setup.source.problem(0)
    search = PolicySearch(setup, problem, policy, budget_tokens, machine, on_tokens=on_tokens)
    ends: list[Ended] = []
    run_batched([search], 1, lambda _, ended: ends.append(ended))
    return search, ends[0]
