"""Trace format: columns, units, file metadata, and the columns that hold each observation.

One file is one trace.  A row is one event in time order, a row group is one episode (one search
over one prompt), so a reader streams one episode at a time.  Version 2 is the packed form of
`arborsim.trace.packed`: a row may stand for a run of tokens, and episodes share row groups.
`TraceInfo` is stored as JSON under
the key ``arborsim.trace`` of the Parquet schema metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from enum import IntEnum, StrEnum
from typing import Any, Literal

import pyarrow as pa

from arborsim.core.errors import TraceError, UsageError
from arborsim.core.geometry import Geometry as Geometry
from arborsim.core.observations import Signal
from arborsim.core.records import convert
from arborsim.core.rope import Rope
from arborsim.core.shape import CacheShape

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
    """How a thought ended, whether or not it repeats another.  Stored as a string; NONE as null."""

    NONE = 0  # it can be continued
    FINISHED = 1  # the reasoning ends here, it holds an answer
    DEAD = 2  # it cannot be continued although it is not finished (the cap on tokens)


#: Labels of the column `end`, in the order of `End` from FINISHED on.
ENDS: tuple[str, ...] = tuple(end.name.lower() for end in End if end is not End.NONE)


class Capture(StrEnum):
    """How much a recording holds; each level includes the ones before it."""

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
        """Tokens of each block that `prefix_blocks` names; 0 for none."""
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
        """Whether `time_s` was measured; otherwise it is 0 throughout."""
        return self.extra.get("times") != "unknown"

    @property
    def cache_shape(self) -> CacheShape:
        """The groups of plans: the captured layers and their KV heads."""
        shape = self.geometry
        return CacheShape(self.qkv_layers, shape.kv_heads, shape.head_dim, self.rope)

    @property
    def unrecorded(self) -> str:
        """Why no recording option supplies what this trace lacks; "" if arborsim recorded it."""
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
        """Parse metadata; unknown keys are kept in `extra`, wrong types raise `TraceError`."""
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


def _column(name: str, kind: pa.DataType, unit: str, about: str) -> pa.Field:
    return pa.field(name, kind, metadata={"unit": unit, "about": about})


_F16_LIST = pa.list_(pa.float16())

#: Columns every trace has.
STRUCTURE: tuple[pa.Field, ...] = (
    _column("episode", pa.int32(), "", "search number, from 0"),
    _column("seq", pa.int32(), "", "row number in the episode, from 0"),
    _column("time_s", pa.float64(), "s", "wall time since the episode began"),
    _column("kind", pa.dictionary(pa.int8(), pa.string()), "", "what the row records"),
    _column("iteration", pa.int32(), "", "decode iteration; equal in one batch; 0 is the prefill"),
    _column("node", pa.int32(), "", "thought block, numbered in order of opening; 0 is the prompt"),
    _column("parent", pa.int32(), "", "parent block; -1 for the prompt"),
    _column("depth", pa.int32(), "", "distance from the prompt's block"),
    _column("position", pa.int32(), "tokens", "position on the path (token rows only)"),
    _column("token", pa.int32(), "", "vocabulary id (token rows only)"),
    _column("logprob", pa.float32(), "nats", "log-probability of the token when it was chosen"),
    _column("entropy", pa.float32(), "nats", "entropy of the distribution after this row's token"),
    _column("reward", pa.float32(), "", "search value in [0, 1] (boundary rows)"),
    _column("text", pa.string(), "", "decoded text of a block (boundary) or the answer"),
    _column("correct", pa.bool_(), "", "verdict on the answer (answer rows, finished thoughts)"),
    _column("end", pa.dictionary(pa.int8(), pa.string()), "",
            "finished or dead; null: the thought can be continued (boundary rows)"),
    _column("answer", pa.string(), "", "what a finished thought answers (boundary rows)"),
)  # fmt: skip

_EMBEDDING = _column("embedding", _F16_LIST, "", "mean last hidden state of the block (boundary)")

#: Columns of the `signals` level.  `attention` or the three `attention_*` columns, not both.
SIGNALS: tuple[pa.Field, ...] = (
    _EMBEDDING,
    _column("hidden_change", _F16_LIST, "", "||h_l(t) - h_l(t-1)|| per layer"),
    _column("key_variance", _F16_LIST, "", "variance over the head dimension, per layer"),
    _column("value_variance", _F16_LIST, "", "variance over the head dimension, per layer"),
    _column("lag_key", _F16_LIST, "", "std of the lag-normalised key, per layer"),
    _column("lag_value", _F16_LIST, "", "std of the lag-normalised value, per layer"),
    _column("key_norm", _F16_LIST, "", "L2 norm of the key, mean over heads, per layer"),
    _column("value_norm", _F16_LIST, "", "L1 norm of the value, mean over heads, per layer"),
    _column("key_sketch", _F16_LIST, "", "random projection of the keys (all layers and heads)"),
    _column("readers", pa.list_(pa.int32()), "step",
            "of a reference task: the step after the token, then the steps that read it"),
)  # fmt: skip
ATTENTION_DENSE: tuple[pa.Field, ...] = (
    _column("attention", _F16_LIST, "probability", "mean over layers and heads, per position"),
)
ATTENTION_SPARSE: tuple[pa.Field, ...] = (
    _column("attention_index", pa.list_(pa.int32()), "position", "top positions of the row"),
    _column("attention_value", _F16_LIST, "probability", "attention to the top positions"),
    _column("attention_rest", pa.float32(), "probability", "mass on all other positions"),
)
ATTENTION_LAYERS: tuple[pa.Field, ...] = (
    _column("attention_layers", pa.list_(_F16_LIST), "probability",
            "for each captured layer its head-mean row, then its head-variance row"),
)  # fmt: skip

HIDDEN: tuple[pa.Field, ...] = (
    _column("hidden", _F16_LIST, "", "output of the chosen layers, [layers x hidden]"),
)

#: Columns of the `qkv` level: vectors of the captured layers, concatenated layer by layer.
QKV: tuple[pa.Field, ...] = (
    _column("queries", _F16_LIST, "", "post-RoPE queries, [layers x heads x head_dim]"),
    _column("keys", _F16_LIST, "", "post-RoPE keys, [layers x kv_heads x head_dim]"),
    _column("values", _F16_LIST, "", "values, [layers x kv_heads x head_dim]"),
)

#: Columns of traces made from logs of requests (`TraceInfo.holds_requests`); an episode's first row
#: has the values.
REQUESTS: tuple[pa.Field, ...] = (
    _column("arrival_s", pa.float64(), "s", "when the request arrived, by the log's own clock"),
    _column("prefix_blocks", pa.list_(pa.int64()), "",
            "ids of the prompt's blocks, in order; equal leading ids are a shared prefix"),
    _column("request", pa.string(), "", "the log's other fields, as JSON"),
)  # fmt: skip

#: The column that packed traces have besides those of the others.
RUN = _column("run", pa.int32(), "rows",
              "of a packed trace: tokens of one block in succession that the row stands for; null "
              "is 1. Of each, seq and position are one higher (and iteration, of generated ones); "
              "values of what has one per token belong to the first")  # fmt: skip

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
    "episode", "seq", "time_s", "kind", "iteration", "node", "parent", "depth",
    "position", "token", "entropy", "reward", "correct", "end",
)  # fmt: skip

#: Columns that earlier recorders did not write: a trace may lack them.
LATER: frozenset[str] = frozenset({"key_norm", "value_norm", "end", "answer", "readers"})

#: Rows that eviction times can be worked out from.
EVICTED_BY: tuple[Signal, ...] = (Signal.ATTENTION, Signal.HEAD_ATTENTION)

#: Signals made of vectors of the captured layers.
VECTORS: tuple[Signal, ...] = (Signal.HEAD_ATTENTION, Signal.KEYS, Signal.VALUES)


def arrow_schema(info: TraceInfo, packed: bool = False) -> pa.Schema:
    """The Arrow schema of a trace with this capture level, metadata included."""
    columns = list(STRUCTURE)
    columns += REQUESTS if info.holds_requests else ()
    if info.capture is Capture.TREE:
        columns += (_EMBEDDING,) if info.embeddings else ()
    else:
        columns += SIGNALS
        columns += ATTENTION_DENSE if info.attention == "dense" else ()
        columns += ATTENTION_SPARSE if info.attention == "sparse" else ()
        columns += ATTENTION_LAYERS if info.attention_layer_ids else ()
        columns += HIDDEN if info.hidden_layers else ()
    if info.capture is Capture.QKV:
        columns += QKV
    columns += (RUN,) if packed else ()
    version = PACKED_VERSION if packed else FORMAT_VERSION
    metadata = {VERSION_KEY: str(version).encode(), METADATA_KEY: info.to_json().encode()}
    return pa.schema(columns, metadata=metadata)


def columns_for(
    needs: Iterable[Signal], info: TraceInfo, text: bool = False, embedding: bool = False
) -> list[str]:
    """The columns to read for these observations; traces made before may lack some of `LATER`."""
    names = list(ROW_COLUMNS)
    for signal in sorted(needs):
        names += signal_columns(signal, info)
    names += ["text", "answer"] if text else []
    names += ["embedding"] if embedding else []
    return list(dict.fromkeys(names))


def signal_columns(signal: Signal, info: TraceInfo) -> tuple[str, ...]:
    """The columns that hold `signal`; a trace with values in the first one has it.

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
