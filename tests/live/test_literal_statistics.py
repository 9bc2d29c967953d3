"""Statistics over what a cache holds, live: each against a literal re-implementation.

Tokens really leave here; what left is in no median, entropy, tertile, scale or share any more.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
import pytest

from arborsim.core.events import TokenRun
from arborsim.core.tiers import Tier
from arborsim.core.tree import ThoughtTree
from arborsim.memory.moves import Moves
from arborsim.play.controller import Controller, Meter
from arborsim.policies.registry import build
from arborsim.searches import make_search
from arborsim_torch.batches import run_batched
from arborsim_torch.capture import Capture
from arborsim_torch.live import policy_search
from arborsim_torch.live.policy_search import PolicySearch
from arborsim_torch.live.setup import CacheOptions, SearchSetup
from arborsim_torch.models import load_model
from arborsim_torch.recording import EpisodeResult
from arborsim_torch.sources import TaskSource

BUDGET = 48
Scores = dict[int, float]


class Evictions(Meter):
    """Which tokens of a search with one group left after each iteration."""

    def __init__(self) -> None:
        self.gone: list[set[int]] = []

    def ran(self, run: TokenRun, tree: ThoughtTree, tier: np.ndarray, moves: Moves) -> None:
        for step in range(run.steps):
            self.gone.append(set(moves.token[moves.step == step].tolist()))

    def moved(self, moves: Moves, tier: np.ndarray, reads: np.ndarray | None = None) -> None:
        if self.gone:
            self.gone[-1] |= set(moves.token[moves.target == Tier.EVICTED].tolist())


@pytest.fixture(scope="module")
def setup() -> SearchSetup:
    loaded = load_model("chain", task_options={"lines": 6})
    return SearchSetup(
        loaded.model, TaskSource(loaded.task), lambda: make_search("linear"), 0.0, 0, 130
    )


def search(setup: SearchSetup, name: str, settings: dict[str, str], seen: Meter) -> Controller:
    ended: list[Any] = []
    one = PolicySearch(
        setup, setup.source.problem(3), build(name, settings), BUDGET, CacheOptions(overlap=False),
        meters=(seen,),
    )  # fmt: skip
    run_batched([one], 1, lambda _, end: ended.append(end))
    assert isinstance(ended[0], EpisodeResult), ended
    (controller,) = one._feed._controllers
    assert isinstance(controller, Controller)
    return controller


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """The row of every generated token, as attention gave it: the mean over the model."""
    found: list[list[float]] = []
    plain = Capture.forward

    def forward(self: Capture, decoder: Any, state: Any, *others: Any) -> None:
        if state.queries == 1:
            found.append(state.attention().half()[0, 0].tolist())
        plain(self, decoder, state, *others)

    monkeypatch.setattr(Capture, "forward", forward)
    return found


class Literal:
    """A cache as a list of tokens, and what its authors' code keeps of them, one step at a time."""

    recent = min(128, BUDGET // 4)

    def __init__(self, prompt: int, born: Scores) -> None:
        self.prompt, self.born = prompt, born  # `born`: what hidden states say of a token
        self.held = list(range(prompt))
        self.used: Scores = {}
        self.received: Scores = {}

    @property
    def generated(self) -> list[int]:
        return [t for t in self.held if t >= self.prompt]

    def step(self, row: list[float]) -> set[int]:
        """A token comes, with its row; which ones go."""
        token = len(row) - 1
        self.held.append(token)
        self.see(row, token)
        gone = self.goes(row) if len(self.held) > BUDGET else set()
        self.held = [t for t in self.held if t not in gone]
        return gone

    def see(self, row: list[float], token: int) -> None: ...

    def goes(self, row: list[float]) -> set[int]:
        raise NotImplementedError


class RaaS(Literal):
    """`RaaSEviction`: what pays the median or more is in use; the least recently used goes."""

    def see(self, row: list[float], token: int) -> None:
        self.used[token] = token
        middle = statistics.median_low(row[t] for t in self.generated)
        self.used.update((t, token) for t in self.generated if row[t] >= middle)

    def goes(self, row: list[float]) -> set[int]:
        return {min(self.generated, key=lambda t: (self.used[t], t))}


class AttnHS(Literal):
    """`AttentionHSProductEviction`: both parts are scaled over all generated tokens held."""

    def see(self, row: list[float], token: int) -> None:
        for t in self.held:
            self.received[t] = self.received.get(t, 0.0) + row[t]

    def goes(self, row: list[float]) -> set[int]:
        def unit(of: Scores) -> Scores:
            low, high = (least(of[t] for t in self.generated) for least in (min, max))
            return {t: (of[t] - low) / ((high - low) or 1.0) for t in self.generated}

        one, other = unit(self.received), unit(self.born)
        may_go = self.generated[: -self.recent]
        return {min(may_go, key=lambda t: (0.5 * one[t] + 0.5 * other[t], t))}


class Segments(Literal):
    """`ThinKVEviction`; segments are numbered by position, where the code cuts the cache anew."""

    size, keeps, pinned = 8, (6, 3, 1), False

    def rank(self, row: list[float], token: int) -> float:
        return row[token]

    def goes(self, row: list[float]) -> set[int]:
        old, gone = self.held[: -self.recent], set[int]()
        first = self.prompt if self.pinned else 0
        segments = {t // self.size: [o for o in old if o // self.size == t // self.size]
                    for t in old}  # fmt: skip
        entropy = {}
        for number, tokens in segments.items():
            mass = sum(row[t] for t in tokens)
            parts = [row[t] / mass for t in tokens if row[t]]
            entropy[number] = round(-sum(p * math.log(p) for p in parts), 9)
        ordered = sorted(entropy.values())
        low, high = ordered[len(ordered) // 3], ordered[2 * len(ordered) // 3]
        room = BUDGET - self.recent - first
        for number, tokens in sorted(segments.items()):
            keep = self.keeps[(entropy[number] > low) + (entropy[number] > high)]
            may_go = [t for t in tokens if t >= first]
            best = sorted(may_go, key=lambda t: (self.rank(row, t), t), reverse=True)
            kept = best[: min(keep, room)]
            room -= len(kept)
            gone |= set(may_go) - set(kept)
        return gone


class SegmentHS(Segments):
    """`HybridSegmentHSEviction`: the prompt stays, and counts in entropies and tertiles."""

    pinned = True

    def rank(self, row: list[float], token: int) -> float:
        return self.born[token]


SEGMENTS = {"segment": "8", "keep_r": "6", "keep_e": "3", "keep_t": "1"}
LITERAL: dict[str, tuple[type[Literal], dict[str, str], str]] = {
    "raas": (RaaS, {"variant": "median"}, ""),
    "attn-hs": (AttnHS, {}, "turns"),
    "thinkv": (Segments, SEGMENTS, ""),
    "segment-hs": (SegmentHS, SEGMENTS, "score"),
}


@pytest.mark.parametrize("name", LITERAL)
def test_decisions_are_those_of_the_literal_code(
    name: str, setup: SearchSetup, rows: list[list[float]]
) -> None:
    kind, settings, born = LITERAL[name]
    seen = Evictions()
    controller = search(setup, name, settings, seen)
    prompt = len(setup.source.problem(3).prompt)
    view = controller.view()
    known = view.scores[born][0].tolist() if born else []
    literal = kind(prompt, dict(enumerate(known)))
    wanted = [literal.step(row) for row in rows[: len(seen.gone)]]
    assert seen.gone == wanted
    assert sum(map(len, wanted)) > BUDGET // 2  # most decisions follow others


class Sparsity(Meter):
    """Of each generated token, the share of small entries among those its heads could read."""

    def __init__(self) -> None:
        self.shares: list[float] = []
        self.evicted = False

    def ran(self, run: TokenRun, tree: ThoughtTree, tier: np.ndarray, moves: Moves) -> None:
        self.evicted |= bool((tier == Tier.EVICTED).any())
        for step in range(run.steps):
            read = [[t for t, at in enumerate(own) if at != Tier.EVICTED] for own in tier.tolist()]
            for own in read:
                own += range(tier.shape[1], tier.shape[1] + step + 1)
            if run.observed.head_attention is None:  # counted where attention is
                ((heads, large),) = (each.leaves[0] for each in run.observed.reduced.values())
                entries = int(heads[step]) // len(read) * sum(map(len, read))
                self.shares.append(1 - large[step] / entries)
                continue
            rows = run.observed.head_attention.row(step)
            by_head = rows.reshape(-1, rows.shape[2])
            small = entries = 0
            for number, head in enumerate(by_head):
                paid = head[read[number * len(read) // len(by_head)]]
                small += sum(weight < np.float32(0.01) * paid.max() for weight in paid)
                entries += len(paid)
            self.shares.append(small / entries)


@pytest.mark.parametrize("reduced", [True, False])
def test_sparsity_is_a_share_of_what_heads_can_read(
    reduced: bool, setup: SearchSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted where attention is, or from rows of single heads on the host."""
    plain = policy_search.capture_of_signals

    def whole(*args: Any, uses: Any = None, **others: Any) -> Any:
        return plain(*args, **others)

    if not reduced:
        monkeypatch.setattr(policy_search, "capture_of_signals", whole)
    seen = Sparsity()
    settings = {"segment": "8", "recent": "8", "most": "6", "least": "2"}
    controller = search(setup, "thinkv-paper", settings, seen)
    assert seen.evicted
    prompt = len(setup.source.problem(3).prompt)
    values = controller.view().scores["sparsity"][0, prompt:]
    np.testing.assert_allclose(values, seen.shares, rtol=0, atol=1e-12)
