"""Trace format: columns, units, file metadata, and the columns that hold each observation.

One file is one trace.  A row is one event in time order, a row group is one episode (one search
over one prompt), so a reader streams one episode at a time.  Version 2 is the packed form of
`arborsim.trace.packed`: a row may stand for a run of tokens, and episodes share row groups.
`TraceInfo` is stored as JSON under the key ``arborsim.trace`` of the Parquet schema metadata.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from arborsim.core.errors import TraceError, UsageError
from arborsim.core.geometry import Geometry as Geometry
from arborsim.core.observations import Signal
from arborsim.core.records import convert
from arborsim.core.shape import CacheShape, Rope

#: Version of traces with a row per token, and of packed ones.
FORMAT_VERSION = 1
PACKED_VERSION = 2
METADATA_KEY = b"arborsim.trace"
VERSION_KEY = b"arborsim.version"


class Kind(IntEnum):
    """The kinds of rows.  Stored as a dictionary-encoded lower-case string."""

    PREFILL = 0  # one prompt token
    TOKEN = 1  # one generated token
    TRANSITION = 2  # the search turns to `node`; consecutive transitions are one batch of leaves
    BOUNDARY = 3  # the block `node` is complete: reward, entropy, embedding, text
    PRUNE = 4  # the search gives up `node` for good
    ANSWER = 5  # the search ends: correct, text; `node` is the chosen leaf


KINDS: tuple[str, ...] = tuple(kind.name.lower() for kind in Kind)


class End(IntEnum):
    """How a thought ended, whether or not it repeats another.  Stored as a string, NONE as null."""

    NONE = 0  # it can be continued
    FINISHED = 1  # the reasoning ends here, it holds an answer
    DEAD = 2  # it cannot be continued although it is not finished (the cap on tokens)


#: Labels of the column `end`, in the order of `End` from FINISHED on.
ENDS: tuple[str, ...] = tuple(end.name.lower() for end in End if end is not End.NONE)


class Capture(StrEnum):
    """How much a recording holds.  Each level includes the ones before it."""

    TREE = "tree"  # structure, lengths, rewards
    SIGNALS = "signals"  # + per-token signals and attention
    QKV = "qkv"  # + query, key and value vectors of some layers


@dataclass(frozen=True)
class TraceInfo:
    """A trace's content and origin (the file's metadata)."""

    geometry: Geometry  # of the model that was recorded
    #: Names; `search_parameters` holds the search's options
    model: str
    task: str
    search: str
    tokenizer: str = ""
    search_parameters: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    capture: Capture = Capture.TREE
    #: How attention rows are stored; "sparse" keeps `attention_top` positions per row
    attention: Literal["dense", "sparse", "none"] = "none"
    attention_top: int = 0
    #: Layers whose vectors (`qkv` capture), whose own rows and whose outputs are stored
    qkv_layers: tuple[int, ...] = ()
    attention_layer_ids: tuple[int, ...] = ()
    hidden_layers: tuple[int, ...] = ()
    #: Of the model; None in traces that do not know it, and if it changes with the context's length
    rope: Rope | None = None
    #: Whether capture level `tree` stores embeddings, as a bank does; the other levels always do
    embeddings: bool = False
    #: Where it ran and the versions it ran with
    device: str = ""
    software: dict[str, str] = field(default_factory=dict)
    #: The recorded timing profile, e.g. ``{"decode_tokens_per_s": ...}``.
    timing: dict[str, float] = field(default_factory=dict)
    command: str = ""  # the command that made it
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def holds_requests(self) -> bool:
        """Whether it was made from a log of requests: it has the columns `REQUESTS`."""
        return "prefix_block_tokens" in self.extra

    @property
    def prefix_block_tokens(self) -> int:
        """Tokens of each block that `prefix_blocks` names, or 0 for none."""
        given = self.extra.get("prefix_block_tokens")
        return given if isinstance(given, int) and given > 0 else 0

    @property
    def knows_token_ids(self) -> bool:
        """Whether `token` has values: what is imported or generated may have lengths only."""
        return self.extra.get("token_ids") != "unknown"

    @property
    def knows_ends(self) -> bool:
        """Whether `end` distinguishes thoughts that ended from those that can be continued."""
        return self.extra.get("ends") != "unknown"

    @property
    def knows_times(self) -> bool:
        """Whether `time_s` was measured, not 0 throughout."""
        return self.extra.get("times") != "unknown"

    @property
    def cache_shape(self) -> CacheShape:
        """The groups of plans: the captured layers and their KV heads."""
        shape = self.geometry
        return CacheShape(self.qkv_layers, shape.kv_heads, shape.head_dim, self.rope)

    @property
    def unrecorded(self) -> str:
        """Why no recording option supplies what this trace lacks, or "" if arborsim recorded it."""
        if "source_format" in self.extra:
            return "the source of this import lacks it"
        return "drawn searches have none" if self.extra.get("generated") else ""

    @property
    def recording(self) -> dict[str, Any]:
        """The task, search and model, by which live runs are compared."""
        names = ("task", "search", "model", "search_parameters")
        return {name: getattr(self, name) for name in names}

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "geometry": self.geometry.to_dict()}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> TraceInfo:
        """Parse metadata.  Unknown keys are kept in `extra`, wrong types raise `TraceError`."""
        try:
            raw = json.loads(text)
            known = {f.name for f in fields(cls)}
            values = {k: v for k, v in raw.items() if k in known}
            unknown = {k: v for k, v in raw.items() if k not in known}
            values["extra"] = values.get("extra", {}) | unknown
            info = convert(cls, values, finite=False)
            if info.rope is not None and info.rope.rotary_dim > info.geometry.head_dim:
                raise ValueError(f"RoPE rotates {info.rope.rotary_dim} channels of a smaller head")
            return info
        except (ValueError, TypeError, AttributeError, UsageError) as error:
            raise TraceError(
                f"the trace's metadata cannot be read ({error}); record it again"
            ) from error


def _columns() -> dict[str, list[pa.Field]]:
    """The columns in ``schema.csv``, by the set that they belong to.

    *structure*: every trace has them.  *signals*: of that level, with one of *attention_dense* and
    *attention_sparse*, and *attention_layers* and *hidden* as chosen.  *qkv*: vectors of the
    captured layers, concatenated layer by layer.  *requests*: of traces made from logs of requests,
    with the values in an episode's first row.  *run*: of packed traces.
    """
    found: dict[str, list[pa.Field]] = {}
    text = Path(__file__).with_suffix(".csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        metadata = {"unit": row["unit"], "about": row["about"]}
        field_ = pa.field(row["name"], _type(row["type"]), metadata=metadata)
        found.setdefault(row["set"], []).append(field_)
    return found


def _type(name: str) -> pa.DataType:
    """A type by its name: that of Arrow, ``label`` for few texts, or ``[name]`` for a list."""
    if name.startswith("["):
        return pa.list_(_type(name[1:-1]))
    return pa.dictionary(pa.int8(), pa.string()) if name == "label" else pa.type_for_alias(name)


COLUMNS: Mapping[str, Sequence[pa.Field]] = _columns()
#: The column that packed traces have besides those of the others.
(RUN,) = COLUMNS["run"]

#: Columns with one value per layer and token, and the signal each one holds.
PER_LAYER: tuple[Signal, ...] = (
    Signal.HIDDEN_CHANGE,
    Signal.KEY_VARIANCE,
    Signal.VALUE_VARIANCE,
    Signal.LAG_KEY,
    Signal.LAG_VALUE,
    Signal.KEY_NORM,
    Signal.VALUE_NORM,
)

#: Columns that are read whatever is asked for.
ROW_COLUMNS = (
    *("episode", "seq", "time_s", "kind", "iteration", "node", "parent", "depth"),
    *("position", "token", "entropy", "reward", "correct", "end"),
)

#: Columns that earlier recorders did not write: a trace may lack them.
LATER: frozenset[str] = frozenset({"key_norm", "value_norm", "end", "answer", "readers"})

#: Rows that eviction times can be worked out from.
EVICTED_BY: tuple[Signal, ...] = (Signal.ATTENTION, Signal.HEAD_ATTENTION)

#: Signals made of vectors of the captured layers.
VECTORS: tuple[Signal, ...] = (Signal.HEAD_ATTENTION, Signal.KEYS, Signal.VALUES)


def arrow_schema(info: TraceInfo, packed: bool = False) -> pa.Schema:
    """The Arrow schema of a trace with this capture level, metadata included."""
    signals = info.capture is not Capture.TREE
    sets = {
        "structure": True,
        "requests": info.holds_requests,
        "signals": signals,
        f"attention_{info.attention}": signals and info.attention != "none",
        "attention_layers": signals and bool(info.attention_layer_ids),
        "hidden": signals and bool(info.hidden_layers),
        "qkv": info.capture is Capture.QKV,
        "run": packed,
    }
    columns = [column for name in sets if sets[name] for column in COLUMNS[name]]
    if info.embeddings and not signals:
        columns.insert(-1 if packed else len(columns), COLUMNS["signals"][0])
    version = PACKED_VERSION if packed else FORMAT_VERSION
    metadata = {VERSION_KEY: str(version).encode(), METADATA_KEY: info.to_json().encode()}
    return pa.schema(columns, metadata=metadata)


def columns_for(
    needs: Iterable[Signal], info: TraceInfo, text: bool = False, embedding: bool = False
) -> list[str]:
    """The columns to read for these observations.  Older traces may lack some of `LATER`."""
    names = list(ROW_COLUMNS)
    for signal in sorted(needs):
        names += signal_columns(signal, info)
    names += ["text", "answer"] if text else []
    names += ["embedding"] if embedding else []
    return list(dict.fromkeys(names))


def signal_columns(signal: Signal, info: TraceInfo) -> tuple[str, ...]:
    """The columns that hold `signal`.  A trace with values in the first one has it.

    None for eviction times, which a replay works out from one of `EVICTED_BY`.
    """
    if signal is Signal.EVICTION_TIME:
        return ()
    if signal is Signal.ATTENTION:
        sparse = ("attention_value", "attention_index", "attention_rest")
        return sparse if info.attention == "sparse" else ("attention",)
    if signal is Signal.HEAD_ATTENTION:
        return "queries", "keys"
    if signal is Signal.ROPE:
        return ()
    return (signal.value,)


def recording_options(missing: Iterable[Signal], info: TraceInfo) -> list[str]:
    """The options of ``arborsim record`` that would supply these observations."""
    options: list[str] = []
    missing = tuple(missing)
    for signal in missing:
        if signal is Signal.REWARD:
            options.append("a --search that scores its blocks (any but linear)")
        elif signal in VECTORS or signal is Signal.ROPE:
            options.append("--capture qkv --qkv-layers all")
        elif signal is Signal.LAYER_ATTENTION:
            options.append("--attention-layers all")
        elif signal is Signal.HIDDEN:
            options.append("--hidden-layers all")
        elif signal is Signal.READERS:
            options.append("--capture signals, from a reference model, by this version of arborsim")
        elif info.capture is Capture.TREE:
            options.append("--capture signals")
        elif signal in (Signal.ATTENTION, Signal.EVICTION_TIME):
            options.append("--attention dense or --attention sparse")
        else:
            options.append("--capture signals by this version of arborsim")
    if Signal.ROPE in missing:  # older versions recorded vectors without it
        options.append("by this version of arborsim")
    return list(dict.fromkeys(options))
