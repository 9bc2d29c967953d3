"""The machine and model that `replay` and `search` charge for: their options and their names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from arborsim.core.errors import UnknownName, UsageError
from arborsim.run.notes import MACHINE

if TYPE_CHECKING:
    from arborsim.bank.results import SearchResult
    from arborsim.core.geometry import Geometry
    from arborsim.machine.machine import Machine

RECALLS = ("stage", "stream", "near", "ondemand")


def check_recall(recall: str) -> None:
    """Refuse a way to read DDR tokens that is none."""
    if recall not in RECALLS:
        raise UnknownName("recall mode", recall, RECALLS)


def geometry_of(model: str, kv_dtype: str, traces: Sequence[Path]) -> Geometry | None:
    """The model of ``--model`` and ``--kv-dtype``; None for the recorded one, as it was recorded.

    Raises
    ------
    UnknownName, UsageError
        There is no such model or type, or the traces were recorded on several models.
    """
    from arborsim.machine.config import with_kv_dtype
    from arborsim.machine.lookup import load_geometry
    from arborsim.trace.reader import TraceReader

    geometry = load_geometry(model) if model else None
    if not kv_dtype:
        return geometry
    recorded = list(dict.fromkeys(TraceReader(path).info.geometry for path in traces))
    if geometry is None and len(recorded) != 1:
        raise UsageError("--kv-dtype: the traces were recorded on several models; give --model")
    return with_kv_dtype(geometry or recorded[0], kv_dtype)


def machine_line(machine: Machine, recorded: Sequence[Geometry]) -> str:
    """GPU, host, model and type of its cache, in a line.

    Parameters
    ----------
    machine : Machine
    recorded : sequence of Geometry
        Of the traces; charged for where the machine names no other.
    """
    charged = charged_geometries(machine, recorded)
    models = "model" if len(charged) == 1 else "models"
    named = " and ".join(
        f"{_name(geometry)}, {_bits(geometry)} KV ({geometry.kv_bytes_per_token:,} B/token)"
        for geometry in charged
    )
    as_recorded = "" if machine.geometry else "recorded "
    return f"GPU {_gpu(machine)}, {_host(machine)} host; {as_recorded}{models} {named}"


def machine_settings(machine: Machine, recorded: Sequence[Geometry]) -> dict[str, str]:
    """What the appendix of a page says of the machine and the model."""
    charged = charged_geometries(machine, recorded)
    as_recorded = "" if machine.geometry else " (as recorded)"
    return {
        MACHINE: machine_line(machine, recorded),
        "GPU": machine.profile.name,
        "host": _host(machine),
        "model geometry": ", ".join(geometry.name + as_recorded for geometry in charged),
        "KV type": ", ".join(dict.fromkeys(map(_bits, charged))),
        "KV bytes per token": ", ".join(f"{each.kv_bytes_per_token:,}" for each in charged),
        "recall of DDR tokens": machine.recall,
        "tokens per page": str(machine.page_tokens),
        "tree attention": "on" if machine.tree_attention else "off",
    }


def machine_notes(machine: Machine, results: Sequence[SearchResult]) -> list[str]:
    """What to know about figures of searches on a bank: assumed times, and what does not fit."""
    from arborsim.run.aggregate import BASELINE, at_budget
    from arborsim.run.fit import does_not_fit
    from arborsim.run.notes import assumed_policy_time

    timed = (r.policy for r in results if r.simulated.measured.time.policy_s)
    runs = (
        (
            r.trace,
            f"{r.label} at width {r.width}"
            + ("" if r.policy == BASELINE else f" under {at_budget(r.policy, r.budget)}"),
            r.simulated.measured,
        )
        for r in results
    )
    return [
        *assumed_policy_time(timed, machine.profile),
        *does_not_fit(runs, machine.profile.name),
    ]


def charged_geometries(machine: Machine, recorded: Sequence[Geometry]) -> list[Geometry]:
    """The models that bytes and seconds are those of, each once."""
    return [machine.geometry] if machine.geometry else list(dict.fromkeys(recorded))


def _gpu(machine: Machine) -> str:
    return machine.profile.name.partition("+")[0]  # h100+ddr5-2tb: see hardware.host.attach


def _host(machine: Machine) -> str:
    return machine.profile.name.partition("+")[2] or "default"


def _name(geometry: Geometry) -> str:
    return re.sub(r", \w+ KV$", "", geometry.name)  # see hardware.config.with_kv_dtype


def _bits(geometry: Geometry) -> str:
    return f"{8 * geometry.kv_bytes_per_element}-bit"
