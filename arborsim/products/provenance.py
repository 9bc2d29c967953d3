"""Where figures come from, in words: machine, model, recordings, policies, searches, versions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from arborsim.core.documents import file_digest
from arborsim.core.errors import UsageError
from arborsim.core.installed import in_words, versions
from arborsim.core.units import quantity
from arborsim.machine.basis import bases
from arborsim.machine.cost import CostModel
from arborsim.machine.fidelity import bases_text, evidence
from arborsim.machine.price import Price
from arborsim.machine.weights import weights_type
from arborsim.play.cautions import acts, assumed_policy_time, does_not_fit
from arborsim.play.results import BASELINE, MACHINE, at_budget
from arborsim.policies.registry import values_of
from arborsim.report.words import counted

if TYPE_CHECKING:
    from arborsim.core.geometry import Geometry
    from arborsim.machine.machine import Machine
    from arborsim.policies.base import Policy
    from arborsim.products.replay.run import Replay
    from arborsim.products.search.results import SearchResult
    from arborsim.products.search.run import SearchJob
    from arborsim.trace.reader import TraceReader

#: Options of a search that follow from the width.
_WIDTHS = ("width", "n", "children")
_KV_TYPE = re.compile(r", \w+ KV(?=,|$)")  # see machine.config.with_kv_dtype


def machine_line(machine: Machine, recorded: Sequence[Geometry]) -> str:
    """GPU, host, model and type of its cache, in a line.

    `recorded` are the models of the traces: charged for where the machine names no other.
    """
    charged = _charged(machine, recorded)
    models = " and ".join(
        f"{_KV_TYPE.sub('', geometry.name)}, {_bits(geometry)} KV "
        f"({geometry.kv_bytes_per_token:,} B/token)"
        for geometry in charged
    )
    kind = ("" if machine.geometry else "recorded ") + ("models" if len(charged) > 1 else "model")
    gpu, host = _gpu_and_host(machine)
    engine = machine.profile.engine
    served = f" under {engine.name}" if engine is not None else ""
    return f"GPU {gpu}{served}, {host} host; {kind} {models}"


def machine_settings(machine: Machine, recorded: Sequence[Geometry]) -> dict[str, str]:
    """Facts about the machine and the model for the appendix of a page."""
    charged = _charged(machine, recorded)
    as_recorded = "" if machine.geometry else " (as recorded)"
    return {
        MACHINE: machine_line(machine, recorded),
        "GPU": machine.profile.name,
        "host": _gpu_and_host(machine)[1],
        "model geometry": ", ".join(geometry.name + as_recorded for geometry in charged),
        "weights": ", ".join(dict.fromkeys(map(_weights, charged))),
        "KV type": ", ".join(dict.fromkeys(map(_bits, charged))),
        "KV bytes per token": ", ".join(f"{each.kv_bytes_per_token:,}" for each in charged),
        "recall of DDR tokens": machine.recall,
        "tokens per page": str(machine.page_tokens),
        "tree attention": "on" if machine.tree_attention else "off",
        "seconds": ", ".join(dict.fromkeys(_bases(machine, each) for each in charged)),
        "error of seconds": " ".join(
            dict.fromkeys(evidence(machine.profile, each).sentence() for each in charged)
        ),
    }


def machine_facts(machine: Machine, recorded: Sequence[Geometry]) -> dict[str, Any]:
    """Machine and model for the metadata of results. Lists where traces have several models."""
    charged = _charged(machine, recorded)
    gpu, host = _gpu_and_host(machine)
    engine = machine.profile.engine
    facts = {
        "model": [geometry.name for geometry in charged],
        "weights_dtype": [weights_type(geometry) for geometry in charged],
        "kv_dtype": [_bits(geometry) for geometry in charged],
    }
    return {
        "gpu": gpu,
        "host": host,
        "engine": engine.name if engine is not None else "",
        **{name: found[0] if len(found) == 1 else found for name, found in facts.items()},
    }


def _bases(machine: Machine, geometry: Geometry) -> str:
    """The basis of the terms of the time."""
    try:
        return bases_text(bases(Price(CostModel(machine.profile, geometry))))
    except UsageError as error:  # a model that the engine cannot serve
        return str(error)


def replay_settings(job: Replay, readers: Sequence[TraceReader]) -> dict[str, str]:
    """Everything that determines the results of a replay."""
    found = {
        **machine_settings(job.machine, [reader.info.geometry for reader in readers]),
        "attention matrices held": "of all layers" if job.machine.keep_matrices else "of one layer",
        "versions": in_words(versions("numpy", "pyarrow", "simpy")),
    }
    for reader in readers:
        info = reader.info
        found[f"trace {reader.path.name}"] = (
            f"{info.task}, {info.search}, recorded on {info.model} (seed {info.seed}), "
            f"sha256 {file_digest(reader.path)}"
        )
    return {**found, **_policies(job.policies)}


def search_settings(job: SearchJob, reader: TraceReader) -> dict[str, str]:
    """Everything that determines the results of searches on a bank."""
    info, problems = reader.info, job.chosen(reader)
    recipe = ", ".join(f"{key} {_shown(value)}" for key, value in info.search_parameters.items())
    found = {
        "bank": f"{reader.path.name}, sha256 {file_digest(reader.path)}",
        "recorded": f"{info.task} on {info.model}, seed {info.seed}; {info.search}"
        + (f" ({recipe})" if recipe else ""),
        "problems": f"{len(problems)}, from {problems.start} to {problems.stop - 1}",
        **_searches(job),
        "repeated thoughts": (
            "dead, where the search does not count them" if job.dedupe else "go on as others do"
        ),
        **machine_settings(job.machine, [info.geometry]),
        **_policies(cell.policy for cell in job.cells),
    }
    budgets = dict.fromkeys(cell.budget.text for cell in job.cells if cell.policy.uses_budget)
    if budgets:
        found["budgets"] = ", ".join(budgets)
    return {**found, "versions": in_words(versions("numpy", "pyarrow", "scipy"))}


def search_heading(job: SearchJob, reader: TraceReader, results: Sequence[SearchResult]) -> str:
    """Which searches ran on what, in a line."""
    problems = counted(len({result.episode for result in results}), "problem")
    machine = machine_line(job.machine, [reader.info.geometry])
    return f"{job.trace.name}: {problems} of {reader.info.task}, simulated on {machine}"


def search_notes(machine: Machine, results: Sequence[SearchResult]) -> list[str]:
    """Notes on figures of searches on a bank: assumed times, and what does not fit."""
    timed = (r.policy for r in results if acts(r.simulated.measured))
    runs = (
        (
            r.trace,
            f"{r.label} at width {r.width}"
            + ("" if r.policy == BASELINE else f" under {at_budget(r.policy, r.budget)}"),
            r.simulated.measured,
        )
        for r in results
    )
    profile = machine.profile
    return [*assumed_policy_time(timed, profile), *does_not_fit(runs, profile.name)]


def _searches(job: SearchJob) -> dict[str, str]:
    """Widths and options of each search."""
    found = {}
    for label in dict.fromkeys(arm.label for arm in job.arms):
        arms = [arm for arm in job.arms if arm.label == label]
        search: Any = arms[0].make()
        options = [
            f"{each.name} {_shown(getattr(search, each.name))}"
            for each in fields(search)
            if each.init and each.name not in _WIDTHS
        ]
        widths = ", ".join(str(arm.width) for arm in arms)
        found[f"search {label}"] = "; ".join([f"width {widths}", ", ".join(options)]).rstrip("; ")
    return found


def _policies(policies: Iterable[Policy]) -> dict[str, str]:
    """The parameters of each."""
    return {f"policy {policy.label}": parameters(values_of(policy)) for policy in policies}


def parameters(values: Mapping[str, Any]) -> str:
    """Parameters of a policy in a line. An empty text is called none."""
    return ", ".join(f"{k} {v}" if v != "" else f"{k} none" for k, v in values.items()) or (
        "no parameters"
    )


def _charged(machine: Machine, recorded: Sequence[Geometry]) -> list[Geometry]:
    """The models that bytes and seconds are those of, each once."""
    return [machine.geometry] if machine.geometry else list(dict.fromkeys(recorded))


def _gpu_and_host(machine: Machine) -> tuple[str, str]:
    gpu, _, host = machine.profile.name.partition("+")  # h100+ddr5-2tb: see machine.lookup
    return gpu, host or "default"


def _weights(geometry: Geometry) -> str:
    """The types of the weights, and what they take."""
    return f"{weights_type(geometry)}, {quantity('bytes', geometry.weight_bytes)}"


def _bits(geometry: Geometry) -> str:
    return f"{8 * geometry.kv_bytes_per_element}-bit"


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
