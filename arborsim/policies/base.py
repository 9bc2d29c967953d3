"""The contract every policy obeys: it sees a view and an event, and says where tokens should live.

A policy is a frozen dataclass whose fields are its hyper-parameters.  It holds no state: whatever
changes while a search runs (scores, tiers, the tree) is in the view, so a decision is a pure
function of view and event.  A policy knows no clock, no device, no bytes and no framework.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from arborsim.core.events import Event, TokenRun
from arborsim.core.formats import FP8, Format
from arborsim.core.observations import Signal
from arborsim.core.row_uses import RowUse
from arborsim.core.settings import check_settings
from arborsim.core.shape import UNKNOWN, CacheShape
from arborsim.core.tiers import Tier, hbm_mask
from arborsim.core.tree import ThoughtTree
from arborsim.memory.moves import Moves, Plan
from arborsim.signals.scores import Score, Steps

NEVER = 1 << 60
METHODS = "arborsim.policies.methods"
ATTENTION_ROWS = frozenset({Signal.ATTENTION, Signal.LAYER_ATTENTION, Signal.HEAD_ATTENTION})
"""Signals that are, or are made from, attention rows, which fused kernels do not give."""


@dataclass(frozen=True)
class CacheView:
    """Everything a policy may know about the cache.  Read-only, on the host, in NumPy."""

    tier: np.ndarray  # int8 [groups, tokens]: where each token lives now (`Tier`)
    #: What `Policy.scores` asked for: float64 [groups, tokens], vectors [groups, tokens, size], or
    #: of pages, [groups, pages, size]
    scores: Mapping[str, np.ndarray]
    tree: ThoughtTree
    leaves: tuple[int, ...]  # active ones: the next tokens will belong to them
    #: First tokens that are the prompt; tokens that HBM may hold after a decision: the mean over
    #: groups, so that a group may hold more where others hold less
    prompt_tokens: int
    budget_tokens: int
    iterations: int  # decode iterations so far
    vocabulary: int  # size of the model's vocabulary, which normalises entropies
    shape: CacheShape = UNKNOWN  # layers, KV heads and vectors that groups stand for
    #: Int64 [groups, tokens]: places among the slots of a group, as the last plan with `Plan.slots`
    #: left them; None if there was none: by age
    slots: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.tier.shape[1])

    @property
    def path(self) -> np.ndarray:
        """Ids of the tokens on any active path, oldest first, int64."""
        if len(self.leaves) == 1:
            return self.tree.path(self.leaves[0])
        on_path = self.tree.on_path(self.leaves)
        return np.flatnonzero(on_path[self.tree.node_of_token.values])

    def stream(self, adaptation: str) -> np.ndarray:
        """Ids of the tokens on the active paths ("path"), or of all ("flat"), oldest first."""
        return self.path if adaptation == "path" else np.arange(self.num_tokens)

    def in_stream(self, mask: np.ndarray, adaptation: str) -> np.ndarray:
        """Where `mask`, bool ``[..., tokens]``, is set and a token belongs to the stream."""
        path = self.path
        if adaptation == "path" and len(path) < self.num_tokens:
            on_path = np.zeros(self.num_tokens, dtype=bool)
            on_path[path] = True
            mask = mask & on_path
        return mask

    def by_slot(self, group: int, tokens: np.ndarray) -> np.ndarray:
        """Ids `tokens`, int64, of a group in the order of their slots."""
        if self.slots is None:
            return tokens
        return np.asarray(tokens[np.argsort(self.slots[group, tokens])])

    @property
    def in_hbm(self) -> int:
        """Tokens in HBM: the mean over groups, rounded up."""
        return -(-int(self.held.sum()) // len(self.tier))

    @property
    def fullest(self) -> int:
        """Tokens in HBM of the group that holds most."""
        return int(self.held.max())

    @cached_property
    def held(self) -> np.ndarray:
        """Tokens in HBM per group, int64 ``[groups]``."""
        mask = hbm_mask(self.tier)
        # Of a few rows counting is faster than adding up.
        return np.array([np.count_nonzero(row) for row in mask]) if len(mask) < 8 else mask.sum(1)


@dataclass(frozen=True)
class Protection:
    """Tokens that never move down: the prompt, attention sinks and the most recent tokens.

    Sinks are the first tokens of the reasoning if the prompt is protected, else of the prompt.
    Several active leaves share the number of recent ones.
    """

    pin_prompt: bool = False
    sinks: int = 0
    recent: int = 1

    def head(self, prompt_tokens: int) -> int:
        """Number of protected tokens at the beginning of a path."""
        return (prompt_tokens if self.pin_prompt else 0) + self.sinks

    def floor(self, prompt_tokens: int) -> tuple[int, str]:
        """Protected tokens, and how their number comes about."""
        prompt = prompt_tokens if self.pin_prompt else 0
        parts = {"prompt": prompt, "sinks": self.sinks, "recent": self.recent}
        made_of = " + ".join(f"{name} {count}" for name, count in parts.items() if count)
        return sum(parts.values()), made_of

    def mask(self, view: CacheView) -> np.ndarray:
        """Bool ``[tokens]``."""
        mask = np.zeros(view.num_tokens, dtype=bool)
        share = max(1, self.recent // len(view.leaves)) if self.recent else 0
        for leaf in view.leaves:
            path = view.tree.path(leaf)
            mask[path[: self.head(view.prompt_tokens)]] = True
            mask[path[max(0, len(path) - share) :]] = True
        return mask


@dataclass(frozen=True)
class Method:
    """How a policy is put together, in the words of `arborsim policies NAME`.

    Five blocks say what matters (score), how much each part may keep (allocate), where tokens go
    (place), when that is decided (schedule), and how lost tokens come back (recover).
    `granularity` is the unit of a decision.
    """

    formula: str
    score: str = "-"
    allocate: str = "one pool"
    place: str = "evict"
    schedule: str = "every iteration over budget"
    recover: str = "never"
    granularity: str = "token"
    deviations: tuple[str, ...] = ()


@cache
def _methods() -> dict[str, Any]:
    """Sections of ``methods.toml`` by name, with their phrases filled in."""
    found = tomllib.loads((Path(__file__).parent / "methods.toml").read_text("utf-8"))
    phrases = found.pop("phrases")

    def filled(text: str) -> list[str]:
        name, _, word = text[1:].partition(" ")
        said = phrases[name] if text.startswith("@") else [text]
        return [each.replace("PRESS", word) for each in said]

    for section in found.values():
        if "deviations" in section:
            section["deviations"] = tuple(chain(*map(filled, section["deviations"])))
        if "official" in section:
            (section["official"],) = filled(section["official"])
    return found


class _Description:
    """A text about a policy: that of its class in ``methods.toml``, or of the class it extends."""

    def __init__(self, default: Any) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, policy: Policy | None, kind: type[Policy]) -> Any:
        own = [each for each in kind.__mro__ if each.__module__.startswith(METHODS)]
        said = [_methods().get(each.__name__, {}).get(self._name) for each in own]
        texts = [text for text in said if text is not None]
        if isinstance(self._default, dict):
            return {name: text for words in reversed(texts) for name, text in words.items()}
        return texts[0] if texts else self._default


def _described(default: Any) -> Any:
    """The class attribute of a policy that ``methods.toml`` or the class itself gives."""
    return _Description(default)


@dataclass(frozen=True)
class Policy:
    """Base of all policies.

    Hyper-parameters are fields made by `arborsim.core.settings.setting`, which checks their range.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = _described("-")
    """Where the method is published."""
    official: ClassVar[str] = _described("-")
    """The authors' code, and how it was compared: ``"owner/repo@commit: literally, 87 cases"``."""
    summary: ClassVar[str] = _described("")
    formula: ClassVar[str] = _described("-")
    """The score or rule, with the symbols of the paper and its equation numbers."""
    deviations: ClassVar[tuple[str, ...]] = _described(())
    """Where this differs from the paper or its public code, and why."""
    operations: ClassVar[Mapping[str, Sequence[str]]] = _described({})
    """Operations that an engine runs for it: in every ``step``, for the ``decision`` of a step, and
    for each ``sequence`` that decides, where its build takes one after the other."""
    words: ClassVar[Mapping[str, str]] = _described({})
    """Attributes of `method` in words of its own."""

    def __post_init__(self) -> None:
        check_settings(self, self.name)

    @property
    def label(self) -> str:
        """Its name in results."""
        return self.name

    @property
    def method(self) -> Method:
        """Formula and building blocks."""
        return Method(self.formula, deviations=self.deviations, **self.words)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Where its plans put tokens."""
        return Tier.HBM, Tier.EVICTED

    @property
    def formats(self) -> tuple[Format, ...]:
        """Formats of the quantised tiers and, if it has them, of the coarse ones.

        Where keys are in groups of tokens, a plan moves whole groups into such a tier: the tokens
        of each active path in turn, oldest first.
        """
        return (FP8,)

    @property
    def fused(self) -> bool:
        """True if no attention row is needed, so that fused attention kernels can run."""
        return not self.reads() & ATTENTION_ROWS

    @property
    def recovers(self) -> bool:
        """True if plans may bring evicted tokens back by recomputing them."""
        return False

    @property
    def bounded(self) -> bool:
        """False for policies that do not keep the cache within the budget."""
        return True

    @property
    def uses_budget(self) -> bool:
        """False for policies that decide the same whatever the budget: replayed once."""
        return True

    def scores(self) -> Mapping[str, Score]:
        """The per-token scores that `decide` reads from the view."""
        return {}

    def reads(self) -> frozenset[Signal]:
        """Observations its scores are computed from: they decide trace columns and model hooks."""
        return frozenset[Signal]().union(*(score.needs for score in self.scores().values()))

    @property
    def grouping(self) -> str:
        """The parts that have rows of their own in a plan: the model ("shared"), layers, KV heads.

        With "layer" and "head" there is a row per captured layer, or per captured layer and KV head
        (layer by layer).  Each stands for an equal share of the cache.
        """
        groupings = (score.grouping for score in self.scores().values())
        return next((grouping for grouping in groupings if grouping != "shared"), "shared")

    def protection(self, budget_tokens: int) -> Protection:
        """Tokens that no plan may move down under this budget."""
        return Protection()

    def protected(self, view: CacheView) -> np.ndarray:
        """Bool ``[tokens]``: tokens that no plan may move down now."""
        return self.protection(view.budget_tokens).mask(view)

    def floor(self, prompt_tokens: int, budget_tokens: int) -> tuple[int, str]:
        """Tokens the policy can never go below in HBM, and how that number comes about."""
        return self.protection(budget_tokens).floor(prompt_tokens)

    def headroom(self, view: CacheView) -> int:
        """Tokens that every group can take before the policy must give some up.

        Below 0 it is over budget.

        By default groups share one budget.  An allocation may be stricter, with a share for each.
        """
        return view.budget_tokens - view.in_hbm

    def next_decision(self, view: CacheView) -> int:
        """Decode iterations until `decide` is to be called: 1 is after the very next one.

        `NEVER` for tree events only.
        """
        return NEVER

    def pressure_margin(self, budget_tokens: int) -> int | None:
        """`Pressure` is raised when no more tokens than this are left (None: never)."""
        return None

    def decide(self, view: CacheView, event: Event) -> Plan | None:
        """Where every token should live after `event`, or None to leave all as it is."""
        return None

    def plans_runs(self, view: CacheView) -> bool:
        """Whether `decide_run` can take the iterations that come next."""
        return False

    def decide_run(self, view: CacheView, run: TokenRun, steps: Steps) -> Moves:
        """Decide for every iteration of `run` at once, exactly as `decide` would after each one.

        A decision was taken after the iterations in which something moves.

        `view` is the cache at the end of the run, but for the decisions still to be taken.
        `steps` yields the iterations 0, 1, ... in order, bringing accumulating scores (arrays in
        ``view.scores``) up to date with each.  It can skip those after which nothing is decided.
        """
        raise TypeError(f"{self.name} decides one iteration at a time")


class LiveHints:
    """Hints for live runs: what memory to set aside, and how little of what is observed is read.

    Mixed into a policy that knows more of its live runs than what follows from its scores.
    Decisions do not depend on them.
    """

    @property
    def bounds_page(self) -> int:
        """Tokens of the pages by whose key bounds it chooses what is read (0: none)."""
        return 0

    def ddr_tokens(self, prompt_tokens: int, new_tokens: int, budget_tokens: int) -> int:
        """Tokens that DDR is expected to hold at most on one path, if the policy uses it.

        Live searches set memory aside for them.  More may come, at the price of growing.
        """
        return max(0, prompt_tokens + new_tokens - budget_tokens)


def hints_of(policy: Policy) -> LiveHints:
    """The hints of a policy, or those that hold for any policy."""
    return policy if isinstance(policy, LiveHints) else LiveHints()


def row_uses(policy: Policy) -> frozenset[RowUse]:
    """Reductions of attention rows that its scores need: rows can stay where they are computed."""
    return frozenset[RowUse]().union(*(score.row_uses for score in policy.scores().values()))


def read_as_norms(policy: Policy) -> frozenset[Signal]:
    """Keys, values or both, where its scores need no more than L1 norms of them."""
    scores = policy.scores().values()
    whole = frozenset[Signal]().union(*(score.needs - score.sizes for score in scores))
    return frozenset[Signal]().union(*(score.sizes for score in scores)) - whole


def hidden_layers(policy: Policy, layers: int) -> frozenset[int]:
    """Those of `layers` layers whose outputs its scores read."""
    each = (score.hidden_layers(layers) for score in policy.scores().values())
    return frozenset[int]().union(*each)
