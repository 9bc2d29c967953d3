"""The signals that policies need of a trace: those it lacks, and what to do about that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from arborsim.core.errors import MissingSignal
from arborsim.core.observations import Signal
from arborsim.policies.base import Policy
from arborsim.policies.registry import parameters
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import recording_options

_SHARED = "shared"
MEANING = "one ranking for all heads, not its authors' form"  #: of a policy with that setting


def needed(policy: Policy) -> frozenset[Signal]:
    """Signals that a policy reads, and the keys that tell which layers and heads it decides for."""
    apart = {Signal.KEYS} if policy.grouping != _SHARED and not policy.reads() else set[Signal]()
    return policy.reads() | apart


def missing(policy: Policy, reader: TraceReader) -> list[Signal]:
    """Signals that a policy needs and the trace lacks."""
    return [signal for signal in sorted(needed(policy)) if not reader.has(signal)]


def require(policy: Policy, reader: TraceReader, who: str = "", in_file: bool = False) -> None:
    """Raise `MissingSignal`, with every remedy there is, unless the trace serves the policy.

    `who` is ``"policy h2o"`` by default.  Settings stand ``in_file`` or on the command line.
    """
    try:
        reader.require(needed(policy), who or f"policy {policy.name}")
    except MissingSignal as error:
        way = instead(policy, reader)
        if not way:
            raise
        how = f'set = {{ per = "{_SHARED}" }}' if in_file else f"--set {policy.name}.{way}"
        raise MissingSignal(f"{error}, or {how}: {MEANING}") from None


def remedy(signals: Sequence[Signal], reader: TraceReader) -> str:
    """How to come by what a trace lacks, or why there is no way."""
    options = " ".join(recording_options(signals, reader.info))
    return reader.info.unrecorded or f"record the trace with {options}"


def instead(policy: Policy, reader: TraceReader) -> str:
    """The setting that makes one ranking for the whole model, if the trace serves that."""
    per = parameters(type(policy)).get("per")
    if per is None or _SHARED not in per.setting.choices:
        return ""
    changed: dict[str, Any] = {"per": _SHARED}
    return "" if missing(replace(policy, **changed), reader) else f"per={_SHARED}"
