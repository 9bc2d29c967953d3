"""Which columns a trace must have, and which of them an observation needs."""

from __future__ import annotations

import pyarrow as pa

from arborsim.core.errors import TraceError
from arborsim.core.observations import Signal
from arborsim.trace.schema import LATER, PER_LAYER, TraceInfo, arrow_schema

#: Columns that are read whatever is asked for.
ROW_COLUMNS = (
    "episode", "seq", "time_s", "kind", "iteration", "node", "parent", "depth",
    "position", "token", "entropy", "reward", "correct", "end",
)  # fmt: skip


def check_columns(schema: pa.Schema, info: TraceInfo, file: str) -> None:
    """Are all columns of this capture level there, with the right types?

    Raises
    ------
    TraceError
    """
    expected = arrow_schema(info)
    missing = [name for name in expected.names if name not in {*schema.names, *LATER}]
    if missing:
        raise TraceError(
            f"{file}: column {', '.join(missing)} is missing, which a trace with capture level "
            f"'{info.capture}' has; record it again"
        )
    for field in expected:
        if field.name in LATER and field.name not in schema.names:
            continue
        if len(schema.get_all_field_indices(field.name)) != 1:
            raise TraceError(f"{file}: column {field.name} is there twice; record it again")
        found = schema.field(field.name).type
        if not _same_type(field.type, found):
            raise TraceError(
                f"{file}: column {field.name} has type {found} instead of {field.type}; "
                "write it with TraceWriter"
            )


def _same_type(expected: pa.DataType, found: pa.DataType) -> bool:
    if pa.types.is_dictionary(expected):
        # The width of the indices is the reader's choice, and plain strings say the same.
        found = found.value_type if pa.types.is_dictionary(found) else found
        expected = expected.value_type
    if pa.types.is_list(expected) and pa.types.is_list(found):
        return _same_type(expected.value_type, found.value_type)  # the item's name is free
    return bool(expected.equals(found))


def columns_for(
    needs: frozenset[Signal],
    info: TraceInfo,
    text: bool = False,
    embedding: bool = False,
    attention_layers: bool = False,
) -> list[str]:
    """The columns to read for these observations; traces made before may lack some of `LATER`."""
    names = list(ROW_COLUMNS)
    names += [signal.value for signal in (*PER_LAYER, Signal.KEY_SKETCH) if signal in needs]
    if Signal.HEAD_ATTENTION in needs:
        names += ["queries"]
    if needs & {Signal.HEAD_ATTENTION, Signal.KEYS}:
        names += ["keys"]
    if Signal.VALUES in needs:
        names += ["values"]
    if needs & {Signal.ATTENTION, Signal.EVICTION_TIME}:
        sparse = ("attention_index", "attention_value", "attention_rest")
        names += sparse if info.attention == "sparse" else ("attention",)
    names += ["text", "answer"] if text else []
    names += ["embedding"] if embedding else []
    if attention_layers or Signal.LAYER_ATTENTION in needs:
        names += ["attention_layers"]
    return names
