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
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from arborsim.trace.columns import lists
from arborsim.trace.importers import sources

_AZURE_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?([+-]\d\d:\d\d|Z)?")
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True)
class Request(sources.WrittenSearch):
    """One request: a search without branches."""

    arrival_s: float = 0.0  # on the source's clock
    #: Ids of the prompt's blocks, in order; requests share the tokens of equal leading ids
    prefix_blocks: tuple[int, ...] = ()
    other: dict[str, Any] | None = None  # the source's other fields

    @classmethod
    def of(
        cls, arrival_s: float, prompt_tokens: int, answer_tokens: int,
        prefix_blocks: tuple[int, ...] = (), other: dict[str, Any] | None = None,
    ) -> Request:  # fmt: skip
        """A request by its lengths; an answer without tokens is no block."""
        batches = (
            [sources.ThoughtBatch([sources.Thought(0, answer_tokens)])] if answer_tokens else []
        )
        return cls(prompt_tokens, batches, None, None, arrival_s, prefix_blocks, other)

    def columns(self) -> dict[str, Any]:
        """The rows of the search; what belongs to the request stands in the first one."""
        columns = super().columns()
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
            other = pa.array([json.dumps(self.other, sort_keys=True)], pa.string())
            columns["request"] = pa.concat_arrays([other, pa.nulls(rows - 1, pa.string())])
        return columns


def json_request(line: str, ticks_per_s: float, block_tokens: int) -> Request:
    """A line of JSON, which may be a `Damage`.

    `timestamp` counts ticks (1000 per second for ms); prefix blocks have `block_tokens` tokens.
    """
    try:
        item = json.loads(line)
    except (ValueError, RecursionError):
        raise sources.Damage("this is not JSON") from None
    arrival_s = sources.finite(sources.field(item, "timestamp"), "timestamp", low=0.0) / ticks_per_s
    prompt = sources.whole(sources.field(item, "input_length"), "input_length", low=1)
    answer = sources.whole(sources.field(item, "output_length"), "output_length")
    named = ("timestamp", "input_length", "output_length", "hash_ids")
    other = {key: value for key, value in item.items() if key not in named}
    blocks = tuple(
        sources.whole(value, "an id in hash_ids", -(1 << 63), (1 << 63) - 1)
        for value in sources.array(sources.field(item, "hash_ids"), "hash_ids")
    )
    complete, every = prompt // block_tokens, math.ceil(prompt / block_tokens)
    if len(blocks) not in (complete, every):  # the last, partial one may be left out
        raise sources.Damage(
            f"hash_ids names {len(blocks)} blocks, but a prompt of {prompt} tokens has "
            f"{every} of {block_tokens}"
        )
    return Request.of(arrival_s, prompt, answer, blocks, other or None)


def azure_request(line: str) -> Request:
    """One line of Azure's CSV, after the header, which may be a `Damage`."""
    try:
        cells = next(csv.reader([line.strip()]), [])
    except csv.Error as error:
        raise sources.Damage(f"this is not CSV ({error})") from None
    if len(cells) != len(AZURE_COLUMNS):
        raise sources.Damage(f"it has {len(cells)} cells instead of {len(AZURE_COLUMNS)}")
    match = _AZURE_TIME.fullmatch(cells[0].strip())
    try:
        if match is None:
            raise ValueError
        moment = datetime.fromisoformat(match[1] + (match[3] or ""))
    except ValueError:
        raise sources.Damage(f"TIMESTAMP is {cells[0]!r:.40} instead of a date and time") from None
    seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    counts = []
    for name, cell in zip(AZURE_COLUMNS[1:], cells[1:], strict=True):
        if not re.fullmatch(r"\d{1,12}", cell.strip(), re.ASCII):
            raise sources.Damage(f"{name} is {cell!r:.40} instead of a whole number")
        counts.append(int(cell))
    prompt = sources.whole(counts[0], "ContextTokens", low=1)
    arrival_s = seconds + float(match[2] or 0)
    return Request.of(arrival_s, prompt, sources.whole(counts[1], "GeneratedTokens"))


def shared_prefix_tokens(requests: Iterable[Request], block_tokens: int) -> int:
    """Prompt tokens that an earlier request had already: what an endless prefix cache saves.

    Requests are in order of arrival; their blocks have `block_tokens` tokens.
    """
    seen: set[int] = set()
    saved = 0
    for request in requests:
        leading = sum(1 for _ in takewhile(seen.__contains__, request.prefix_blocks))
        saved += min(leading * block_tokens, request.prompt_tokens)
        seen.update(request.prefix_blocks)
    return saved


class Format(NamedTuple):
    """How a line becomes a request, tokens of a prefix block (0: none), and the header, if any."""

    request_of: Callable[[str], Request]
    block_tokens: int
    header: str = ""


FORMATS = {
    "mooncake": Format(partial(json_request, ticks_per_s=1000.0, block_tokens=512), 512),
    "bailian": Format(partial(json_request, ticks_per_s=1.0, block_tokens=16), 16),
    "azure": Format(azure_request, 0, ",".join(AZURE_COLUMNS)),
}


def read_requests(path: Path, format: str, limit: int = 0) -> sources.Contents[Request]:
    """The requests of a log in one of `FORMATS`, as `read_lines` reads it."""
    made = FORMATS[format]
    return sources.read_lines(path, made.request_of, limit, made.header)
