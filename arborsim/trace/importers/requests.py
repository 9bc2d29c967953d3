"""Logs of requests to a served model: a prompt, an answer, an arrival, and shared prefixes.

Sources: Mooncake (Qin et al., 2025), JSON lines with `timestamp` in ms and ids of 512-token prefix
blocks; Qwen-Bailian's usage traces, JSON lines with `timestamp` in s, 16-token blocks and the
conversation (`chat_id`, `parent_chat_id`, `turn`, `type`); Azure's LLM inference traces, CSV with
TIMESTAMP, ContextTokens and GeneratedTokens, without prefixes.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from arborsim.trace.columns import lists
from arborsim.trace.importers.sources import (
    Contents,
    Damage,
    array,
    field,
    finite,
    read_lines,
    whole,
)
from arborsim.trace.importers.write import Thought, ThoughtBatch, WrittenSearch

_AZURE_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?([+-]\d\d:\d\d|Z)?")
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True)
class Request:
    """One request."""

    arrival_s: float  # on the source's clock
    prompt_tokens: int
    answer_tokens: int
    #: Ids of the prompt's blocks, in order; requests share the tokens of equal leading ids
    prefix_blocks: tuple[int, ...] = ()
    other: dict[str, Any] | None = None  # the source's other fields

    def __post_init__(self) -> None:
        self.search()  # raises if it is too long

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.answer_tokens

    def search(self) -> WrittenSearch:
        """The request as a search without branches; an answer without tokens is no block."""
        batches = [ThoughtBatch([Thought(0, self.answer_tokens)])] if self.answer_tokens else []
        return WrittenSearch(self.prompt_tokens, batches)

    def columns(self) -> dict[str, Any]:
        """Columns of an episode; what belongs to the request stands in its first row."""
        columns = self.search().columns()
        rows = len(columns["kind"])
        arrival = np.full(rows, np.nan)
        arrival[0] = self.arrival_s
        columns["arrival_s"] = arrival
        if self.prefix_blocks:
            offsets = np.full(rows + 1, len(self.prefix_blocks), dtype=np.int32)
            offsets[0] = 0
            blocks = np.asarray(self.prefix_blocks, dtype=np.int64)
            columns["prefix_blocks"] = lists(blocks, offsets, np.arange(rows) > 0)
        if self.other:
            told = pa.array([json.dumps(self.other, sort_keys=True)], pa.string())
            columns["request"] = pa.concat_arrays([told, pa.nulls(rows - 1, pa.string())])
        return columns


@dataclass(frozen=True)
class JsonLines:
    """Requests as JSON lines."""

    ticks_per_s: float  # what `timestamp` counts: 1000 for ms, 1 for s
    block_tokens: int  # tokens per prefix block

    def request_of(self, line: str) -> Request:
        """One line, which may be a `Damage`."""
        try:
            item = json.loads(line)
        except (ValueError, RecursionError):
            raise Damage("this is not JSON") from None
        arrival_s = finite(field(item, "timestamp"), "timestamp", low=0.0) / self.ticks_per_s
        prompt = whole(field(item, "input_length"), "input_length", low=1)
        answer = whole(field(item, "output_length"), "output_length")
        named = ("timestamp", "input_length", "output_length", "hash_ids")
        other = {key: value for key, value in item.items() if key not in named}
        blocks = self._blocks(field(item, "hash_ids"), prompt)
        return Request(arrival_s, prompt, answer, blocks, other or None)

    def _blocks(self, ids: Any, prompt: int) -> tuple[int, ...]:
        found = tuple(
            whole(value, "an id in hash_ids", -(1 << 63), (1 << 63) - 1)
            for value in array(ids, "hash_ids")
        )
        complete, every = prompt // self.block_tokens, math.ceil(prompt / self.block_tokens)
        if len(found) not in (complete, every):  # the last, partial one may be left out
            raise Damage(
                f"hash_ids names {len(found)} blocks, but a prompt of {prompt} tokens has "
                f"{every} of {self.block_tokens}"
            )
        return found


def azure_request(line: str) -> Request:
    """One line of Azure's CSV, after the header, which may be a `Damage`."""
    try:
        cells = next(csv.reader([line.strip()]), [])
    except csv.Error as error:
        raise Damage(f"this is not CSV ({error})") from None
    if len(cells) != len(AZURE_COLUMNS):
        raise Damage(f"it has {len(cells)} cells instead of {len(AZURE_COLUMNS)}")
    match = _AZURE_TIME.fullmatch(cells[0].strip())
    try:
        if match is None:
            raise ValueError
        moment = datetime.fromisoformat(match[1] + (match[3] or ""))
    except ValueError:
        raise Damage(f"TIMESTAMP is {cells[0]!r:.40} instead of a date and time") from None
    seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    counts = []
    for name, cell in zip(AZURE_COLUMNS[1:], cells[1:], strict=True):
        if not re.fullmatch(r"\d{1,12}", cell.strip(), re.ASCII):
            raise Damage(f"{name} is {cell!r:.40} instead of a whole number")
        counts.append(int(cell))
    prompt = whole(counts[0], "ContextTokens", low=1)
    arrival_s = seconds + float(match[2] or 0)
    return Request(arrival_s, prompt, whole(counts[1], "GeneratedTokens"))


def shared_prefix_tokens(requests: Iterable[Request], block_tokens: int) -> int:
    """Prompt tokens that an earlier request had already: what an endless prefix cache saves.

    Parameters
    ----------
    requests : iterable of Request
        In order of arrival.
    block_tokens : int
        Tokens per block; 0 for sources without prefixes.
    """
    seen: set[int] = set()
    saved = 0
    for request in requests:
        leading = 0
        for block in request.prefix_blocks:
            if block not in seen:
                break
            leading += 1
        saved += min(leading * block_tokens, request.prompt_tokens)
        seen.update(request.prefix_blocks)
    return saved


class Format(NamedTuple):
    """How a line becomes a request, tokens of a prefix block (0: none), and the header, if any."""

    request_of: Callable[[str], Request]
    block_tokens: int
    header: str = ""


FORMATS = {
    "mooncake": Format(JsonLines(1000.0, 512).request_of, 512),
    "bailian": Format(JsonLines(1.0, 16).request_of, 16),
    "azure": Format(azure_request, 0, ",".join(AZURE_COLUMNS)),
}


def read_requests(path: Path, format: str, limit: int = 0) -> Contents:
    """The requests of a log in one of `FORMATS`; only the first `limit`, if that is not 0.

    Raises
    ------
    UsageError
        The file cannot be read, or has another header.
    """
    made = FORMATS[format]
    return read_lines(path, made.request_of, limit, made.header)
