"""The ``[[mix]]`` tables of a workload: traces, and what to generate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arborsim.core.errors import UsageError
from arborsim.core.fields import MOST_SEED, Section, located
from arborsim.core.observations import Signal
from arborsim.plan.distributions import parse_counts
from arborsim.plan.generate import TreeSpec, generated_info
from arborsim.plan.workload import Generated, MixEntry, PolicyChoice
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import Geometry, recording_options

_KEYS = ("name", "weight", "shared_prompt_tokens", "trace", "generated")
_COUNTS = ("prompt_tokens", "thought_tokens", "depth", "branching", "first")
_REQUIRED = _COUNTS[:2]
_SHARES = ("pruned", "finished")
_OTHERS = ("parallel", "rewards", "solved", "searches", "seed")
_REWARDS = ("none", "uniform")
_MOST_SEARCHES = 1_000_000  # they are held in memory until they are written
_SEARCHES = 64  #: Distinct searches of a generated entry, unless it says otherwise.


def read_mix(raw: Any, base: Path, seed: int) -> tuple[MixEntry, ...]:
    """Every entry; recorded traces are opened, so that a missing one is noticed now.

    Parameters
    ----------
    raw : list of dict
        As `tomllib` gives it; anything else is refused.
    base : Path
    seed : int
        Of the workload; generated entries draw from ``seed + their number``.

    Raises
    ------
    UsageError
    """
    if not raw:
        raise UsageError("[[mix]] is missing: name at least one trace, or what to generate")
    if not isinstance(raw, list):
        raise UsageError("mix must be written as [[mix]], one table per kind of search")
    entries: list[MixEntry] = []
    for number, values in enumerate(raw):
        entry = _entry(values, f"[[mix]] {number + 1}", base, seed + number)
        if any(entry.name == other.name for other in entries):
            raise UsageError(f"[[mix]] {number + 1}: there is another entry called '{entry.name}'")
        entries.append(entry)
    return tuple(entries)


def _entry(raw: Any, place: str, base: Path, seed: int) -> MixEntry:
    section = Section(raw, place, _KEYS)
    weight = section.number("weight", above=0) if "weight" in section else 1.0
    if ("trace" in section) == ("generated" in section):
        raise UsageError(f"{place} needs either trace or generated")
    shared = section.whole("shared_prompt_tokens", 0) if "shared_prompt_tokens" in section else 0
    if "trace" in section:
        path = base / section.text("trace")
        with located(section.at("trace")):
            TraceReader(path)
        name = section.text("name") if "name" in section else path.stem
        return MixEntry(name, weight, path, shared)
    made = _generated(section.value("generated"), section.at("generated"), base, seed)
    name = section.text("name") if "name" in section else place.replace("[[mix]]", "generated")
    return MixEntry(name, weight, made, shared)


def _generated(raw: Any, place: str, base: Path, seed: int) -> Generated:
    section = Section(raw, place, (*_COUNTS, *_SHARES, *_OTHERS))
    counts: dict[str, Any] = {
        key: parse_counts(section.value(key), section.at(key), base)
        for key in _COUNTS
        if key in section or key in _REQUIRED
    }
    shares: dict[str, Any] = {key: tuple(section.numbers(key)) for key in _SHARES if key in section}
    rewards = "rewards" in section and section.choice("rewards", "rewards", _REWARDS)
    with located(place):
        spec = TreeSpec(
            **counts,
            **shares,
            parallel=section.whole("parallel", 0) if "parallel" in section else 0,
            rewards=rewards == "uniform",
            solved=section.number("solved") if "solved" in section else None,
        )
    searches = section.whole("searches", 1, _MOST_SEARCHES) if "searches" in section else _SEARCHES
    own_seed = section.whole("seed", 0, MOST_SEED) if "seed" in section else seed
    return Generated(spec, searches, own_seed)


def check_signals(
    mix: Sequence[MixEntry], policies: Sequence[PolicyChoice], geometry: Geometry
) -> None:
    """Refuse a policy that reads what a trace of the mix does not hold.

    Raises
    ------
    UsageError
        Names the policy, the entry, the signals, and the recording options that supply them.
    """
    for number, entry in enumerate(mix, 1):
        reader = TraceReader(entry.source) if isinstance(entry.source, Path) else None
        for choice in policies:
            with located(f"[[mix]] {number} ({entry.name})"):
                if reader is not None:
                    reader.require(choice.policy.reads(), f"policy {choice.name}")
                elif isinstance(entry.source, Generated):
                    _require(entry.source, choice, geometry)


def _require(made: Generated, choice: PolicyChoice, geometry: Geometry) -> None:
    """Generated searches have rewards at most: everything else must have been recorded."""
    held = {Signal.REWARD} if made.spec.rewards else set()
    missing = sorted(choice.policy.reads() - held)
    if not missing:
        return
    if missing == [Signal.REWARD]:
        remedy = 'set rewards = "uniform"'
    else:
        info = generated_info(made.spec, made.seed, geometry)
        remedy = f"record a trace with {' '.join(recording_options(missing, info))} and name it"
    raise UsageError(
        f"policy {choice.name} reads {' and '.join(missing)}, which generated searches do not "
        f"have: {remedy}"
    )
