"""How the columns of a trace are laid out in Parquet: small, and read by every Parquet reader."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

#: Few labels, many rows.
_DICTIONARY = ["kind", "end", "answer"]
#: Counters, whose differences need a bit or none.  The other integers repeat in patterns that zstd
#: finds by itself, and that differences hide (`attention_index`: a fifth more).
_RISING = {"seq", "iteration", "node", "position", "prefix_blocks"}


def open_parquet(file: Any, schema: pa.Schema) -> pq.ParquetWriter:
    """A Parquet writer with the encodings of a trace.

    Counters are stored as differences.  Byte-stream-split puts the bytes of equal significance
    together, which lets zstd find the redundancy of float16 signals.  Page checksums let a reader
    notice damage.
    """
    return pq.ParquetWriter(
        file,
        schema,
        compression="zstd",
        use_dictionary=_DICTIONARY,
        column_encoding=encodings(schema),
        write_page_checksum=True,
    )


def encodings(schema: pa.Schema) -> dict[str, str]:
    """Parquet's encoding by column (``list.list.element`` for a list's values).

    Columns that are not named are stored plainly, or with a dictionary.
    """
    found: dict[str, str] = {}
    for field in schema:
        path, kind = field.name, field.type
        while pa.types.is_list(kind):
            path, kind = f"{path}.list.element", kind.value_type
        if pa.types.is_floating(kind):
            found[path] = "BYTE_STREAM_SPLIT"
        elif field.name in _RISING:
            found[path] = "DELTA_BINARY_PACKED"
    return found
