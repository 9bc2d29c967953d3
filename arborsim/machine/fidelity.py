"""How far off simulated seconds were where others have measured: one file, one reader.

``fidelity.toml`` is written by ``arborsim validate published --fidelity FILE``: errors of the time
per output token on judged runs, by GPU, engine, type of weights, and one GPU or several.
`evidence` says in words what the seconds of a machine and a model rest on.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Annotated

from msgspec import Meta

from arborsim.core.geometry import Geometry
from arborsim.core.records import Text, from_toml
from arborsim.core.sourced import Basis
from arborsim.machine.profile import HardwareProfile

_Share = Annotated[float, Meta(ge=0)]
_VERSION = re.compile(r"-(\d[\w.]*)$")  # of an engine: vllm-0.12
_SHARES = ("mfu", "mbu", "kv_read_efficiency")  # of the peaks, in a roofline
_WIDTHS = {2: "bfloat16", 4: "fp32"}
#: Types of weights by the names that runs give them.
_WEIGHTS = {"": "bfloat16", "bf16": "bfloat16", "fp16": "bfloat16"}


@dataclass(frozen=True)
class Fidelity:
    """Errors of the time per output token, on some judged runs, as shares."""

    gpu: Text  # name of its profile
    engine: Text
    weights: Text
    several_gpus: bool
    runs: Annotated[int, Meta(ge=1)]
    median: _Share  # of the sizes of the errors
    high: _Share  # their 90th percentile
    signed: float  # median with its sign: above 0, simulated is more than measured


@dataclass(frozen=True)
class FidelityFile:
    """The contents of the file."""

    date: Text  # when it was made
    version: Text  # of arborsim
    source: Text  # of the runs
    #: All judged runs together; 0 if the file does not say
    runs: Annotated[int, Meta(ge=0)] = 0
    median: _Share = 0.0
    high: _Share = 0.0
    group: tuple[Fidelity, ...] = ()


def fidelity(gpu: str, engine: str, weights: str, gpus: int) -> Fidelity | None:
    """The errors on runs of this kind; None if there was none.

    `gpu` names a profile.  One in another host (``h100+ddr5-2tb``) counts as the GPU.
    """
    wanted = (gpu.partition("+")[0], engine, _WEIGHTS.get(weights, weights), gpus > 1)
    for each in fidelity_file().group:
        if (each.gpu, each.engine, each.weights, each.several_gpus) == wanted:
            return each
    return None


@cache
def fidelity_file() -> FidelityFile:
    """All of the shipped file."""
    file = resources.files("arborsim.machine") / "fidelity.toml"
    return from_toml(FidelityFile, file.read_text(encoding="utf-8"), "fidelity.toml")


@dataclass(frozen=True)
class Evidence:
    """The evidence for the seconds of a model on a machine."""

    gpu: str  # name of its profile, without the host
    gpus: int  # that serve together
    engine: str
    weights: str  # type of most of them
    #: "kind" if runs of this kind were compared, "all" if only others were, "" if none; "roofline",
    #: "fitted roofline" or "assumed roofline" without measured kernels, by its shares of the peaks
    basis: str
    runs: int = 0  # that were compared
    median: float = 0.0  # of the sizes of their errors, as shares
    high: float = 0.0  # their 90th percentile
    far: bool = False  # whether constants were fitted to other versions of the engine alone

    @property
    def error(self) -> float | None:
        """The error of seconds to reckon with, as a share; None if it is not known.

        It is the median, or the 90th percentile for a version that is far from those fitted.
        """
        return (self.high if self.far else self.median) if self.runs else None

    @property
    def machine(self) -> tuple[str, int, str]:
        """Candidates that agree in this have their errors in common."""
        return self.gpu, self.gpus, self.engine

    def sentence(self) -> str:
        """In words, with a full stop."""
        if not self.far:
            return self._sentence()
        return (
            f"{self._sentence()} No constant was fitted to this version of the engine "
            f"({self.engine}): costs are widened by the 90th percentile."
        )

    def _sentence(self) -> str:
        if self.basis.endswith("roofline"):
            shares = self.basis.removesuffix("roofline").strip() or "measured"
            return (
                f"On {self.gpu}, seconds rest on a roofline with {shares} shares: no published run "
                "was compared for this GPU."
            )
        median, high = share_text(self.median), share_text(self.high)
        off = f"{median} in the median, {high} at the 90th percentile"
        if self.basis == "kind":
            where = f"several {self.gpu}" if self.gpus > 1 else self.gpu
            runs = f"{self.runs:,} run{'s' * (self.runs != 1)}"
            return (
                f"On {where}, {self.engine} and {self.weights} weights, seconds per token of "
                f"published runs were off by {off} ({runs})."
            )
        number = "several" if self.gpus > 1 else "one"
        none = (
            "No published run was compared for this GPU, engine and type of weights "
            f"({number} {self.gpu}, {self.engine}, {self.weights})"
        )
        if not self.runs:
            return f"{none}: how far off seconds are is not known."
        return f"{none}: over all {self.runs:,} judged runs seconds per token were off by {off}."


def evidence(profile: HardwareProfile, geometry: Geometry, gpus: int = 1) -> Evidence:
    """The evidence for seconds of a model on a machine of some GPUs."""
    gpu, weights = profile.name.partition("+")[0], weights_kind(geometry)
    engine = profile.engine.name if profile.engine is not None else ""
    if not profile.kernels or profile.engine is None:
        rests = {Basis.ASSUMED: "assumed ", Basis.FITTED: "fitted "}
        worst = max(profile.basis(name) for name in _SHARES)
        return Evidence(gpu, gpus, engine, weights, f"{rests.get(worst, '')}roofline")
    version = _VERSION.search(engine)
    far = version is not None and not profile.engine.fitted_to(f"{version[1]}.")
    for name in dict.fromkeys((engine, _VERSION.sub("", engine))):
        if found := fidelity(gpu, name, weights, gpus):
            errors = found.runs, found.median, found.high
            return Evidence(gpu, gpus, engine, weights, "kind", *errors, far)
    every = fidelity_file()
    if not every.runs:
        return Evidence(gpu, gpus, engine, weights, "", far=far)
    return Evidence(gpu, gpus, engine, weights, "all", every.runs, every.median, every.high, far)


def weights_kind(geometry: Geometry) -> str:
    """The type of most of a model's weights, by the name that runs give it."""
    kind = geometry.expert_type if geometry.experts else geometry.weights
    width = geometry.weight_bytes_per_element
    return kind or _WIDTHS.get(width, f"{8 * width}-bit")


def share_text(share: float) -> str:
    """In whole per cent."""
    return f"{share:.0%}" if share >= 0.01 or not share else "less than 1%"


def bases_text(bases: Mapping[str, Basis]) -> str:
    """How many terms of the time rest on what: ``"5 terms measured, 2 interpolated"``."""
    counts = Counter(bases.values())
    parts = [f"{counts[basis]} {basis.name.lower()}" for basis in Basis if counts[basis]]
    if not parts:
        return "no terms"
    number, _, rest = parts[0].partition(" ")
    return ", ".join([f"{number} term{'s' * (number != '1')} {rest}", *parts[1:]])
