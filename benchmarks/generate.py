"""Generated traces of the sizes that matter, written by the trace writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from arborsim.machine.lookup import load_geometry
from arborsim.trace.schema import Capture, Kind, TraceInfo, arrow_schema
from arborsim.trace.writer import TraceWriter

PROMPT = 256
TOP = 256
STRUCTURE = ["episode", "seq", "time_s", "kind", "iteration", "node", "parent", "depth",
             "position", "token", "entropy", "reward", "correct"]  # fmt: skip
ATTENTION = {
    "none": [],
    "dense": ["attention"],
    "sparse": ["attention_index", "attention_value", "attention_rest"],
}


def generate(
    path: Path, episodes: int, tokens: int, attention: str = "none", signals: tuple[str, ...] = ()
) -> Path:
    """A linear trace on Llama-3.1-8B's geometry with random signals.

    Parameters
    ----------
    episodes, tokens : int
        Searches, and tokens of each (prompt included).
    attention : {"none", "dense", "sparse"}
    signals : tuple of str
        Columns with one value per layer (or the key sketch) to fill; the others are null.
    """
    geometry = load_geometry("llama-3.1-8b")
    info = TraceInfo(
        geometry, model="generated", task="random", search="linear", capture=Capture.SIGNALS,
        attention=attention, attention_top=TOP if attention == "sparse" else 0,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    rows = tokens + 3  # a transition, a boundary, an answer
    with TraceWriter(path, info, overwrite=True, check=False) as writer:
        for _ in range(episodes):
            columns = _structure(rows, tokens, info)
            is_token = columns.pop("is_token")
            for name in signals:
                width = 16 if name == "key_sketch" else geometry.layers
                values = rng.gamma(4.0, 1.0, (tokens, width)).astype(np.float16)
                columns[name] = _lists(values.ravel(), np.where(is_token, width, 0))
            if attention == "dense":
                columns["attention"] = _dense(rng, tokens, is_token)
            elif attention == "sparse":
                columns.update(_sparse(rng, tokens, is_token))
            writer.write_episode(columns)
    return path


def _structure(rows: int, tokens: int, info: TraceInfo) -> dict[str, Any]:
    kind = np.full(rows, Kind.TOKEN, dtype=np.int8)
    kind[:PROMPT], kind[PROMPT] = Kind.PREFILL, Kind.TRANSITION
    kind[-2:] = Kind.BOUNDARY, Kind.ANSWER
    is_token = (kind == Kind.PREFILL) | (kind == Kind.TOKEN)
    node = np.where(np.arange(rows) < PROMPT, 0, 1)
    iteration = np.zeros(rows, dtype=np.int32)
    iteration[PROMPT + 1 : -2] = np.arange(1, tokens - PROMPT + 1)
    iteration[-2:] = tokens - PROMPT

    def masked(values: np.ndarray) -> pa.Array:
        full = np.zeros(rows, dtype=np.int32)
        full[is_token] = values
        return pa.array(full, mask=~is_token)

    null = {
        field.name: pa.nulls(rows, field.type)
        for field in arrow_schema(info)
        if field.name not in ("episode", "seq")
    }
    return {
        **null, "is_token": is_token, "time_s": np.arange(rows) * 1e-3, "kind": kind,
        "iteration": iteration, "node": node, "parent": node - 1, "depth": node,
        "position": masked(np.arange(tokens)), "token": masked(np.arange(tokens) % 1000),
    }  # fmt: skip


def _lists(values: np.ndarray, lengths: np.ndarray) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def _dense(rng: np.random.Generator, tokens: int, is_token: np.ndarray) -> pa.Array:
    lengths = np.zeros(len(is_token), dtype=np.int64)
    lengths[is_token] = np.arange(1, tokens + 1)
    row = rng.uniform(0.5, 1.5, int(lengths.sum())).astype(np.float32)
    starts = np.cumsum(lengths[is_token]) - lengths[is_token]
    row /= np.repeat(np.add.reduceat(row, starts), lengths[is_token])
    return _lists(row.astype(np.float16), lengths)


def _sparse(rng: np.random.Generator, tokens: int, is_token: np.ndarray) -> dict[str, pa.Array]:
    """Rows that keep `TOP` positions with nine tenths of the mass."""
    kept = np.minimum(np.arange(1, tokens + 1), TOP)
    index, value = [], []
    for length, count in enumerate(kept, start=1):
        ranks = np.arange(count)
        spread = ((ranks + rng.random(count)) * (length / count)).astype(np.int64)
        spread = np.maximum.accumulate(spread - ranks) + ranks  # rising, one position each
        index.append(np.minimum(spread, length - count + ranks))
        weight = rng.uniform(0.5, 1.5, count)
        value.append(weight / weight.sum() * (0.9 if length > TOP else 1.0))
    lengths = np.zeros(len(is_token), dtype=np.int64)
    lengths[is_token] = [len(part) for part in index]
    rest = np.zeros(len(is_token), dtype=np.float32)
    rest[is_token] = np.where(np.arange(1, tokens + 1) > TOP, 0.1, 0.0)
    return {
        "attention_index": _lists(np.concatenate(index).astype(np.int32), lengths),
        "attention_value": _lists(np.concatenate(value).astype(np.float16), lengths),
        "attention_rest": pa.array(rest, mask=~is_token),
    }


def columns_read(signals: tuple[str, ...], attention: str) -> list[str]:
    """The columns that a replay of these signals reads."""
    return [*STRUCTURE, *signals, *ATTENTION[attention]]
