"""What there is to say about a policy, as plain data: for the terminal and for JSON."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from inspect import cleandoc
from typing import Any

from arborsim.core.observations import Signal
from arborsim.core.tiers import Tier
from arborsim.policies.base import Policy
from arborsim.policies.registry import Parameter, build, find, parameters

#: Headings of the list, and how the papers of their policies begin.
FAMILIES = (
    ("Hidden states and cheap signals (EpiKV)", "EpiKV"),
    ("Memory hierarchy", "semantics-aware memory hierarchy"),
    ("Mixed precision (ARKV)", "ARKV"),
    ("Trees of thoughts (ArborKV)", "ArborKV"),
)
BASELINES, COMPOSITIONS, INSTALLED = "Baselines", "Compositions", "Of your own"

_PER = {"shared": "shared by all layers", "layer": "per layer", "head": "per layer and KV head"}
_SIGNALS = {
    Signal.ATTENTION: "attention",
    Signal.HIDDEN_CHANGE: "hidden state",
    Signal.KEY_VARIANCE: "key var.",
    Signal.VALUE_VARIANCE: "value var.",
    Signal.LAG_KEY: "lag",
    Signal.LAG_VALUE: "lag",
    Signal.KEY_NORM: "key norm",
    Signal.VALUE_NORM: "value norm",
    Signal.KEY_SKETCH: "key sketch",
    Signal.LAYER_ATTENTION: "layers' attention",
    Signal.HEAD_ATTENTION: "heads' attention",
    Signal.KEYS: "keys",
    Signal.VALUES: "values",
    Signal.EVICTION_TIME: "future",
}


@dataclass(frozen=True)
class ParameterFacts:
    """One parameter, as text but for its default."""

    name: str
    default: Any
    type: str
    unit: str
    allowed: str
    about: str


@dataclass(frozen=True)
class PolicyFacts:
    """A policy with its default settings; see `Policy` and `Method` for the meaning."""

    name: str
    family: str
    paper: str
    summary: str
    description: str
    formula: str
    score: str
    allocate: str
    place: str
    schedule: str
    recover: str
    granularity: str
    per: str
    reads: tuple[str, ...]
    fused: bool
    tiers: tuple[str, ...]
    knows_budget: bool
    keeps_budget: bool
    deviations: tuple[str, ...]
    parameters: tuple[ParameterFacts, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which knows no infinity."""
        facts = asdict(self)
        for each in facts["parameters"]:
            if isinstance(each["default"], float) and not math.isfinite(each["default"]):
                each["default"] = str(each["default"])
        return facts

    @property
    def short_paper(self) -> str:
        """Without identifiers: ``"Zhang et al. 2023"``."""
        short = re.split("[,:(]", self.paper, maxsplit=1)[0].strip()
        return short.removeprefix("semantics-aware ")

    @property
    def unit(self) -> str:
        """What a decision is about, in a few words."""
        grain = self.granularity.partition(",")[0]
        return {"layer": f"{grain} per layer", "head": f"{grain} per head"}.get(self.per, grain)

    @property
    def sees(self) -> str:
        """What it reads, in short words."""
        return ", ".join(dict.fromkeys(_SIGNALS.get(Signal(s), s) for s in self.reads)) or "-"

    @property
    def tier_code(self) -> str:
        """A letter per tier, e.g. ``"H-D-x"``."""
        return "".join(
            letter if tier.name in self.tiers else "-"
            for tier, letter in zip(Tier, "HhDdx", strict=True)
        )

    @property
    def per_text(self) -> str:
        return _PER[self.per]


def facts_of(name: str) -> PolicyFacts:
    """The facts of the policy called `name`, or at ``package.module:Class``, or in ``file.toml``.

    Raises
    ------
    UnknownName
        No policy has that name; the message names the nearest.
    """
    kind, policy = find(name), build(name)
    method = policy.method
    return PolicyFacts(
        name=policy.name,
        family=_family(kind),
        paper=policy.paper,
        summary=policy.summary,
        description=cleandoc(kind.__doc__ or ""),
        formula=method.formula,
        score=method.score,
        allocate=method.allocate,
        place=method.place,
        schedule=method.schedule,
        recover=method.recover,
        granularity=method.granularity,
        per=policy.grouping,
        reads=tuple(sorted(str(signal) for signal in policy.reads())),
        fused=policy.fused,
        tiers=tuple(tier.name for tier in method.tiers),
        knows_budget=policy.uses_budget,
        keeps_budget=policy.bounded,
        deviations=tuple(method.deviations),
        parameters=tuple(_parameter(each) for each in parameters(kind).values()),
    )


def _family(kind: type[Policy]) -> str:
    from arborsim.policies.composition import Composition

    for heading, paper in FAMILIES:
        if kind.paper.startswith(paper):
            return heading
    if issubclass(kind, Composition):
        return COMPOSITIONS
    return BASELINES if kind.__module__.startswith("arborsim.policies.") else INSTALLED


def _parameter(each: Parameter) -> ParameterFacts:
    options = getattr(each.kind, "__args__", (each.kind,))
    names = [getattr(option, "__name__", str(option)) for option in options]
    kind = " or ".join("none" if name == "NoneType" else name for name in names)
    made = each.setting
    return ParameterFacts(each.name, each.default, kind, made.unit, made.bounds, made.about)
