"""Files with measured times of GPU kernels, by GPU and inference engine.

A table file (``tables/h100-vllm.parquet``) holds the times of one GPU under one engine's kernels:

- ``product``: matrix products of `tokens` rows, by output and input width and type of the weights;
- ``decode`` and ``prefill``: attention of `sequences` sequences with `tokens` cached, or prompt,
  tokens each, by query heads, KV heads, head size, window (0 for none) and type of the cache.
- ``experts``: all routed experts of a layer for `tokens` tokens, whose choices are uneven.
- ``latent-decode`` and ``latent-prefill``: a layer's multi-head latent attention, by heads.
- ``all-reduce``: adding up `tokens` bf16 numbers over `gpus` GPUs, captured in a graph or launched.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.outputs import whole
from arborsim.machine.grid import Bound, Grid, place

if TYPE_CHECKING:
    import pandas as pd

FORMAT = 1
_SHARED = ("window", "head_dim", "kv_heads", "heads", "sequences", "tokens")
_SPLIT = ("experts", "experts_per_token", "tensor_parallel", "expert_parallel")
#: The axes of each table, those that a model fixes first; the last one is `tokens`.
TABLES: dict[str, tuple[str, ...]] = {
    "product": ("out_features", "in_features", "tokens"),
    "decode": _SHARED,
    "prefill": _SHARED,
    "experts": ("in_features", "out_features", *_SPLIT, "tokens"),
    "latent-decode": ("heads", "sequences", "tokens"),
    "latent-prefill": ("heads", "sequences", "tokens"),
    "all-reduce": ("gpus", "tokens"),
}
#: How many of the last axes a table's times rise along, if not all: heads, sequences and tokens.
_RISING = {"decode": 3, "prefill": 3, "all-reduce": 1}
#: Columns of a table file, in order; those that a table does not need are null.
KEYS = tuple(dict.fromkeys(axis for axes in TABLES.values() for axis in reversed(axes)))
_HEADER = ("gpu", "engine", "versions", "source", "licence", "groups")


class KernelTables:
    """The tables of one GPU under one engine, read from a file when they are needed."""

    def __init__(self, path: Path) -> None:
        from arborsim.core.parquet import ParquetTables, ends_of, one_line

        self.path = path
        unread = f"{path}: cannot be read as kernel tables"
        try:
            begins, ends, _ = ends_of(path)
        except OSError as error:
            raise UsageError(f"{unread}: {error.strerror}") from None
        if not (begins and ends):
            raise UsageError(f"{unread}: it is no Parquet file, or was cut off")
        shown = f"{path}: kernel tables"
        self._file = ParquetTables(path, shown, remedy="import them again")
        stored = self._file.schema.metadata or {}
        try:
            header = dict(json.loads(stored.get(b"arborsim.kernels", b"{}")))
        except (ValueError, TypeError, RecursionError) as error:
            raise UsageError(f"{unread}: {one_line(error)}") from None
        if header.get("format") != FORMAT:
            raise UsageError(
                f"{path}: kernel tables of format {header.get('format', 'unknown')}, and this "
                f"version reads format {FORMAT}: import them again (arborsim hardware import)"
            )
        if lacking := [name for name in _HEADER if name not in header]:
            raise UsageError(
                f"{path}: damaged kernel tables: no {', '.join(lacking)} in the header"
            )
        self.gpu, self.engine = str(header["gpu"]), str(header["engine"])
        self.versions: dict[str, str] = header["versions"]  # by table, of the engine
        self.source, self.licence = str(header["source"]), str(header["licence"])
        #: What the tables of latent attention include: a ``module`` with its projections, or the
        #: ``kernel`` alone
        self.latent_covers = str(header.get("latent_covers", ""))
        self._read: dict[tuple[str, str], list[np.ndarray]] = {}
        try:
            self._groups = {(table, kind): n for n, (table, kind) in enumerate(header["groups"])}
        except (ValueError, TypeError):
            raise UsageError(f"{path}: damaged kernel tables: groups in the header") from None
        if len(self._groups) != self._file.metadata.num_row_groups:
            raise UsageError(f"{path}: damaged kernel tables: groups are missing")

    def types(self, table: str) -> list[str]:
        """The types that a table was measured with."""
        return [kind for name, kind in self._groups if name == table]

    def columns(self, table: str, kind: str) -> list[np.ndarray]:
        """The axes of a table, one value a row, and seconds; of one type."""
        found = self._read.get((table, kind))
        if found is None:
            if (table, kind) not in self._groups:
                known = self.types(table)
                raise UnknownName(f"type of {table} kernels in {self.path.name}", kind, known)
            names = [*TABLES[table], "seconds"]
            group = self._file.read([self._groups[table, kind]], names, f"{table}, {kind}: ")
            for name in names:
                wanted = "float" if name == "seconds" else "int32"
                if name not in group.column_names or (
                    str(group[name].type) != wanted or group[name].null_count
                ):
                    raise UsageError(
                        f"{self.path}: damaged kernel tables: {table} lacks {name}, or it is no "
                        f"{wanted} throughout"
                    )
            from arborsim.trace.columns import values_of  # loads pyarrow

            found = [values_of(group.column(name)) for name in names]
            self._read[table, kind] = found
        return found

    def grid(
        self, table: str, kind: str, bound: Bound, *fixed: float, roofline: Bound | None = None
    ) -> Grid:
        """A table as a grid of the axes after the `fixed` ones, measured next to these."""
        *keys, seconds = self.columns(table, kind)
        for n, value in enumerate(fixed):
            axis = np.unique(keys[n])
            low, high, share = place(axis, float(np.clip(value, axis[0], axis[-1])))
            near = keys[n] == axis[low]
            if share:
                near |= keys[n] == axis[high]
            keys, seconds = [key[near] for key in keys], seconds[near]
        rising = _RISING.get(table, len(keys))
        return _grid(keys, seconds.astype(float), bound, roofline, rising).at(*fixed)

    def experts(
        self,
        kind: str,
        model: Mapping[str, int],
        bound: Bound,
        roofline: Callable[[int, int], Bound] | None = None,
    ) -> tuple[Grid, float] | None:
        """Seconds by tokens of the layer of experts that is nearest to `model`, with its share.

        `model` gives the table's axes but `tokens`, `roofline` one by tensor and expert
        parallelism.  Where just these GPUs were not measured, those that hold the nearest number of
        weights count, and the share is the ratio of the weights; None if the experts have another
        shape.
        """
        *keys, seconds = self.columns("experts", kind)
        rows = dict(zip(TABLES["experts"], keys, strict=True))
        same = np.ones(len(seconds), dtype=bool)
        for name in ("in_features", "out_features", "experts", "experts_per_token"):
            same &= rows[name] == model[name]
        if not same.any():
            return None
        split = np.stack([rows["tensor_parallel"], rows["expert_parallel"]])[:, same]
        wanted = np.array([[model["tensor_parallel"]], [model["expert_parallel"]]])
        away = 10 * np.abs(np.log(split.prod(axis=0) / wanted.prod()))
        away += np.abs(np.log(split / wanted)).sum(axis=0)
        chosen = split[:, np.argmin(away)]
        at = (split == chosen[:, None]).all(axis=0)
        least = roofline(*chosen.tolist()) if roofline else None
        grid = _grid([rows["tokens"][same][at]], seconds[same][at].astype(float), bound, least, 1)
        return grid, float(chosen.prod() / wanted.prod())


def _grid(
    keys: Sequence[np.ndarray],
    seconds: np.ndarray,
    bound: Bound,
    roofline: Bound | None,
    rising: int,
) -> Grid:
    axes, index = zip(*(np.unique(key, return_inverse=True) for key in keys), strict=True)
    values = np.full([len(axis) for axis in axes], np.nan)
    values[tuple(index)] = seconds
    return Grid(axes, values, bound, roofline, rising)


@lru_cache(maxsize=8)
def load_tables(path: Path) -> KernelTables:
    """The tables of a file, opened once."""
    return KernelTables(path)


def shipped_tables() -> dict[tuple[str, str], Path]:
    """The files that come with arborsim, by GPU and engine."""
    folder = resources.files("arborsim.machine").joinpath("tables")
    found = {}
    for entry in folder.iterdir():
        gpu, dash, engine = entry.name.removesuffix(".parquet").rpartition("-")
        if dash and entry.name.endswith(".parquet"):
            found[gpu, engine] = Path(str(entry))
    return found


def write_tables(
    path: Path, tables: Mapping[tuple[str, str], pd.DataFrame], header: Mapping[str, Any]
) -> None:
    """Write tables by name and type, rows sorted, seconds rounded to 11 bits (0.05%).

    `header` holds ``gpu``, ``engine``, ``versions``, ``source`` and ``licence``.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    fields = [pa.field("table", pa.string()), pa.field("type", pa.string())]
    fields += [pa.field(name, pa.int32()) for name in KEYS]
    stored = {**header, "format": FORMAT, "groups": [list(key) for key in tables]}
    schema = pa.schema(
        [*fields, pa.field("seconds", pa.float32())],
        metadata={"arborsim.kernels": json.dumps(stored, sort_keys=True)},
    )
    labels = [field.name for field in fields]
    packed: dict[str, Any] = {"compression": "zstd", "compression_level": 19}
    packed |= {"use_dictionary": labels, "column_encoding": {"seconds": "BYTE_STREAM_SPLIT"}}
    with whole(path) as part, pq.ParquetWriter(part, schema, **packed) as writer:
        for (table, kind), rows in tables.items():
            rows = rows.sort_values(list(TABLES[table]))
            none = np.full(len(rows), np.nan)
            columns: list[Any] = [[table] * len(rows), [kind] * len(rows)]
            columns += [rows.get(name, none) for name in KEYS]
            columns.append(_rounded(rows["seconds"].to_numpy(dtype=np.float32)))
            typed = zip(columns, schema.types, strict=True)
            arrays = [pa.array(values, type=each, from_pandas=True) for values, each in typed]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema), len(rows))


def _rounded(seconds: np.ndarray) -> np.ndarray:
    bits = seconds.view(np.uint32).astype(np.int64) + (1 << 12)
    return (bits & ~0x1FFF).astype(np.uint32).view(np.float32)
