"""JSON schemas (draft 2020-12) of what ``--json`` prints, made from the records themselves.

All keys of a record are there in every document.  A number that is not known is null, as strict
JSON has no NaN.  Later versions may add keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any

import msgspec

from arborsim.products.declare import Option
from arborsim.products.options import print_json

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer"}
NUMBER: Schema = {"type": ["number", "null"]}
_REF = "#/$defs/{name}"


def schema_names() -> list[str]:
    """The commands whose ``--json`` has a schema."""
    return sorted(_DOCUMENTS)


def schema_of(command: str) -> Schema:
    """The schema of what ``arborsim COMMAND --json`` prints.

    Raises `UnknownName`: no such command prints JSON.
    """
    from arborsim.core.errors import UnknownName

    if command not in _DOCUMENTS:
        raise UnknownName("command with --json", command, _DOCUMENTS)
    records: dict[str, Schema] = {}
    document = _DOCUMENTS[command](records)
    used = {name: records[name] for name in sorted(_used(document, records))}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"arborsim {command} --json",
        **document,
        **({"$defs": used} if used else {}),
    }


def _used(schema: Any, records: Mapping[str, Schema]) -> set[str]:
    """The records that a schema refers to, also through other records."""
    if isinstance(schema, list):
        return {name for each in schema for name in _used(each, records)}
    if not isinstance(schema, dict):
        return set()
    found = {name for each in schema.values() for name in _used(each, records)}
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        found |= {name} | _used(records[name], records)
    return found


def _record(kind: type, records: dict[str, Schema]) -> Schema:
    """A reference to the schema of a dataclass, which goes into `records` with all it holds."""
    (made,), found = msgspec.json.schema_components([kind], ref_template=_REF)
    for name, each in found.items():
        records.setdefault(name, _complete(each))
    return dict(made)


def _complete(schema: Any) -> Any:
    """Numbers may be null. All keys of a record are there."""
    if isinstance(schema, list):
        return [_complete(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _complete(value) for key, value in schema.items() if key != "default"}
    if made.get("type") == "number":
        made["type"] = NUMBER["type"]
    if "properties" in made:
        made["required"] = sorted(made["properties"])
    return made


def _object(properties: Mapping[str, Schema]) -> Schema:
    required = sorted(properties)
    return {"type": "object", "properties": dict(properties), "required": required}


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _mapping(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def _one_or_all(document: Schema) -> Schema:
    """With a name, one document. Without, a list of all."""
    return {"anyOf": [document, _array(document)]}


def _extended(
    kind: type,
    records: dict[str, Schema],
    more: Mapping[str, Schema],
    without: tuple[str, ...] = (),
    *,
    unknown: bool = False,
) -> Schema:
    """A record with further keys, or without some. With `unknown` its counts may be null."""
    _record(kind, records)
    properties = records.pop(kind.__name__)["properties"]
    found = {**{name: each for name, each in properties.items() if name not in without}, **more}
    if unknown:
        found = {name: _COUNT if each == COUNT else each for name, each in found.items()}
    return _object(found)


def _flat(sample: Mapping[str, Any], **others: Schema) -> Schema:
    """A row whose values have the types of a sample's."""
    kinds = {bool: FLAG, int: COUNT, float: NUMBER, str: TEXT}
    return _object({name: others.get(name) or kinds[type(v)] for name, v in sample.items()})


def _numbers(*names: str) -> dict[str, Schema]:
    return dict.fromkeys(names, NUMBER)


_COUNT: Schema = {"type": ["integer", "null"]}
_TEXTS, _SETTINGS = _array(TEXT), _mapping(TEXT)
_VERDICT: Schema = {"type": ["boolean", "null"]}


def _texts(*names: str) -> dict[str, Schema]:
    return dict.fromkeys(names, TEXT)


def _replay(records: dict[str, Schema]) -> Schema:
    from arborsim.play.results import LeftOut, Row
    from arborsim.products.replay.tables import DERIVED, flat_sample

    more = {name: COUNT if name.endswith("_bytes") else NUMBER for name in DERIVED}
    # What could not run is a row, too, of which hardly anything is known.
    row = _extended(Row, records, more, unknown=True)
    lists = dict.fromkeys(("assumed", "notes", "does_not_fit"), _TEXTS)
    lists |= {"rows": _array(row), "episodes": _array(_flat(flat_sample()))}
    left_out = _array(_record(LeftOut, records))
    return _object({"settings": _SETTINGS, **lists, "left_out": left_out})


def _search(records: dict[str, Schema]) -> Schema:
    from arborsim.core.measurements import Measurements
    from arborsim.products.search.results import FIGURES, SearchResult, SearchRow, Simulated

    figures = (*FIGURES, "tokens_per_s")
    ratios = _numbers(*figures, *(f"{name}_vs_rebase" for name in figures))
    empty: dict[str, Any] = {"int": 0, "str": ""}
    plain = {f.name: empty[str(f.type)] for f in fields(SearchResult) if f.type in empty}
    nothing = Simulated(Measurements(), 0, 0.0, 0.0, 0, 0.0)
    sample = SearchResult(**plain, correct=None, simulated=nothing)
    row = _extended(SearchRow, records, ratios, ("figures", "reference"), unknown=True)
    lists = dict.fromkeys(("assumed", "verdicts", "notes", "left_out"), _TEXTS)
    lists |= {"rows": _array(row), "searches": _array(_flat(sample.flat(), correct=_VERDICT))}
    return _object({"heading": TEXT, "settings": _SETTINGS, **lists})


def _plan(records: dict[str, Schema]) -> Schema:
    from arborsim.products.plan.results import PlanResult

    return _extended(PlanResult, records, {}, ("timeline",))


def _live(records: dict[str, Schema]) -> Schema:
    from arborsim.play.backends import LiveFacts, LiveResult
    from arborsim.products.live.tables import DERIVED, SILENT, LiveRow, flat

    derived = _numbers(*DERIVED, "hbm_vs_full", "speed_vs_full")
    unknown = {"correct": _VERDICT, "steps_right": _COUNT, "steps": _COUNT}
    result = _flat(flat(LiveResult(0, "", "", 0, None, 0, 0, 0.0)), **unknown)
    rows = _array(_extended(LiveRow, records, derived, SILENT))
    asked = {"request": {"type": "object"}, "command": TEXT, "shadow": FLAG}
    found = {"rows": rows, "results": _array(result), "notes": _TEXTS}
    return _object({"facts": _record(LiveFacts, records), **asked, **found})


def _fidelity(records: dict[str, Schema]) -> Schema:
    from arborsim.play.backends import LiveFacts
    from arborsim.play.fidelity import FidelityResult
    from arborsim.products.fidelity.tables import flat, sample_record

    result = flat(FidelityResult(0, "", "", "", 0, 0))
    whole = {name: COUNT for name in result if name.startswith(("counts_", "agree_"))}
    numbers = {n: NUMBER for n in result if n.startswith(("kl_", "nll_", "full_nll_"))}
    row = _flat(sample_record(), infeasible=_TEXTS)
    rows = {"rows": _array(row), "results": _array(_flat(result, **numbers, **whole))}
    asked = {"request": {"type": "object"}, "command": TEXT, "notes": _TEXTS}
    return _object({"facts": _record(LiveFacts, records), **asked, **rows})


def _results(records: dict[str, Schema]) -> Schema:
    from arborsim.products.sweep.compare import COLUMNS_OF_CELLS, GROUP_FIGURES, RELATIVE

    kinds = {"str": {"type": ["string", "null"]}, "int": _COUNT, "float": NUMBER, "bool": _VERDICT}
    cell = {name: kinds[kind] for name, kind in COLUMNS_OF_CELLS.items()} | _numbers(*RELATIVE)
    group = _object(_numbers(*GROUP_FIGURES))  # and a text for each of `by`
    rows = {"anyOf": [_array(_object(cell)), _array(group)]}
    counts = {"cells": COUNT, "superseded": COUNT}
    return _object({"folder": TEXT, **counts, "by": _TEXTS, "rows": rows})


def _tune(records: dict[str, Schema]) -> Schema:
    from arborsim.products.tune.run import Figures

    names = [each.name for each in fields(Figures)]
    figures = [f"{where}_{name}" for where in ("tuned", "held_out") for name in names]
    said = {"format": COUNT, "versions": _SETTINGS, "settings": _SETTINGS, "varied": _array(_TEXTS)}
    asked = {"question": {"type": "object"}}
    metadata = _object({**_texts("kind", "version", "command"), **said, **asked})
    # And a value for each setting that was varied.
    trial = {"trial": COUNT, **_numbers("budget", *figures), "front": FLAG, "reason": TEXT}
    return _object({"metadata": metadata, "trials": _array(_object(trial))})


def _inspect(records: dict[str, Schema]) -> Schema:
    from arborsim.products.traces.describe import Description

    return _record(Description, records)


def _policies(records: dict[str, Schema]) -> Schema:
    said = ("name", "family", "paper", "official", "summary", "description", "formula")
    blocks = ("score", "allocate", "place", "schedule", "recover", "granularity")
    parameter = {**_texts("name", "type", "unit", "allowed", "about"), "default": {}}
    policy = {
        **_texts(*said, *blocks),
        "per": {"enum": ["shared", "layer", "head"]},
        **dict.fromkeys(("reads", "tiers", "deviations"), _TEXTS),
        **dict.fromkeys(("fused", "knows_budget", "keeps_budget"), FLAG),
        "formats": _array(_object({"bits": COUNT, "about": TEXT})),
        "parameters": _array(_object(parameter)),
    }
    return _one_or_all(_object(policy))


def _hardware(records: dict[str, Schema]) -> Schema:
    from arborsim.machine.numbers import Number

    price = _object({**_numbers("low", "high"), **_texts("currency", "date", "source")})
    numbers = {"numbers": _array(_record(Number, records)), "kernels": _SETTINGS}
    known = {"name": TEXT, **numbers, "price_per_hour": {"anyOf": [price, {"type": "null"}]}}
    return _one_or_all(_object(known))


def _models(records: dict[str, Schema]) -> Schema:
    from arborsim.core.geometry import Geometry
    from arborsim.machine.machine import KvRoom

    cache = ("kv_bytes_per_token", "kv_bytes_per_token_beyond_the_window")
    more = ("active_parameters", "weight_bytes", "expert_bytes", *cache)
    # Tokens are null where the cache stops growing.
    pool = _extended(KvRoom, records, {"pool_bytes": COUNT, "tokens": _COUNT})
    known = {**dict.fromkeys(more, COUNT), "gpu": TEXT, "pool": pool}
    return _one_or_all(_extended(Geometry, records, known))


def _doctor(records: dict[str, Schema]) -> Schema:
    from arborsim.core.installed import Installation

    return _record(Installation, records)


_DOCUMENTS: dict[str, Callable[[dict[str, Schema]], Schema]] = {
    "doctor": _doctor,
    "fidelity": _fidelity,
    "hardware": _hardware,
    "inspect": _inspect,
    "live": _live,
    "models": _models,
    "plan": _plan,
    "policies": _policies,
    "replay": _replay,
    "results": _results,
    "search": _search,
    "sweep": _results,
    "tune": _tune,
}


def schema(name: Annotated[str, Option(complete="schema")]) -> None:
    """Print the JSON schema (draft 2020-12) of what a command prints with --json.

    Parameters
    ----------
    name
        A command that has --json.
    """
    print_json(schema_of(name))
