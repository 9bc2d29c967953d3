"""Logs of requests to a served model: a prompt, an answer, an arrival, and shared prefixes.

Sources: Mooncake (Qin et al., 2025), JSON lines with `timestamp` in ms and ids of 512-token prefix
blocks.  Qwen-Bailian's usage traces, JSON lines with `timestamp` in s, 16-token blocks and the
conversation (`chat_id`, `parent_chat_id`, `turn`, `type`).  Azure's LLM inference traces, CSV with
TIMESTAMP, ContextTokens and GeneratedTokens, without prefixes.
"""

from __future__ import annotations

import csv
import json
import math
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa

from arborsim.trace.columns import lists
from arborsim.trace.importers import fields, searches, sources
from arborsim.trace.schema import Kind
from arborsim.trace.writer import WholeTraceWriter

_AZURE_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?([+-]\d\d:\d\d|Z)?")
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


#: Most requests, and ids of prefix blocks, of a row group.
_GROUP_REQUESTS, _GROUP_BLOCKS = 1024, 1 << 20


@dataclass(frozen=True)
class Request(searches.Imported):
    """One request: a search without branches, whose answer is a block if it has tokens."""

    arrival_s: float  # on the source's clock
    prompt_tokens: int
    answer_tokens: int
    #: Ids of the prompt's blocks, in order; requests share the tokens of equal leading ids
    prefix_blocks: Sequence[int] = ()
    other: dict[str, Any] | None = None  # the source's other fields

    packed: ClassVar[bool] = True

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.answer_tokens

    @classmethod
    def write(
        cls, items: Sequence[Any], writer: WholeTraceWriter, advance: searches.Advance
    ) -> None:
        for group in _groups(items):
            first = writer.num_episodes
            writer.write_packed(packed_columns(group, first))
            advance(f"request {first}", sum(request.num_tokens for request in group))


def _groups(requests: Sequence[Request]) -> Iterator[list[Request]]:
    """The requests of each row group: few enough to be held in memory at once."""
    group: list[Request] = []
    blocks = 0
    for request in requests:
        if len(group) == _GROUP_REQUESTS or (group and blocks > _GROUP_BLOCKS):
            yield group
            group, blocks = [], 0
        group.append(request)
        blocks += len(request.prefix_blocks)
    yield group


#: Rows of a request: its prompt, and if there is an answer the turn to it, the answer, its end.
_KINDS = np.array([Kind.PREFILL, Kind.TRANSITION, Kind.TOKEN, Kind.BOUNDARY], dtype=np.int8)


def packed_columns(requests: Sequence[Request], first: int) -> dict[str, Any]:
    """The packed rows of requests, as `WholeTraceWriter.write_packed` takes them.

    The first of them is episode number `first`.  What belongs to a request stands in its first row.
    """
    prompts = np.array([request.prompt_tokens for request in requests], dtype=np.int32)
    answers = np.array([request.answer_tokens for request in requests], dtype=np.int32)
    counts = np.where(answers > 0, len(_KINDS), 1)
    number = np.repeat(np.arange(len(requests)), counts)  # of each row's request
    begins = np.cumsum(counts) - counts
    part = np.arange(len(number)) - begins[number]  # which of `_KINDS`
    prompt, answer = prompts[number], answers[number]
    begun, none = part == 0, np.full(len(number), -1, dtype=np.int32)

    def of_each(*values: Any) -> np.ndarray:
        return np.asarray(np.choose(part, values), dtype=np.int32)

    columns = {
        "episode": (first + number).astype(np.int32),
        "seq": of_each(0, prompt, prompt + 1, prompt + 1 + answer),
        "run": of_each(prompt, none, answer, none),
        "kind": _KINDS[part],
        "iteration": of_each(0, 0, 1, answer),
        "node": of_each(0, 1, 1, 1),
        "parent": of_each(-1, 0, 0, 0),
        "depth": of_each(0, 1, 1, 1),
        "position": of_each(0, none, prompt, none),
        "token": none,  # no source here has any, nor times
        "time_s": np.zeros(len(number)),
        "arrival_s": np.full(len(number), np.nan),
    }
    columns["arrival_s"][begun] = [request.arrival_s for request in requests]
    lengths = np.zeros(len(number) + 1, dtype=np.int64)
    lengths[1:][begun] = [len(request.prefix_blocks) for request in requests]
    ids = [np.asarray(request.prefix_blocks, dtype=np.int64) for request in requests]
    other: list[str | None] = [None] * len(number)
    for at, request in zip(begins.tolist(), requests, strict=True):
        if request.other:
            other[at] = json.dumps(request.other, sort_keys=True)
    return {
        **columns,
        "prefix_blocks": lists(np.concatenate(ids), np.cumsum(lengths), lengths[1:] == 0),
        "request": pa.array(other, pa.string()),
    }


def json_request(line: str, ticks_per_s: float, block_tokens: int) -> Request:
    """A line of JSON, which may be a `Damage`.

    `timestamp` counts ticks (1000 per second for ms).  Prefix blocks have `block_tokens` tokens.
    """
    try:
        item = json.loads(line)
    except (ValueError, RecursionError):
        raise fields.Damage("this is not JSON") from None
    arrival_s = fields.finite(fields.field(item, "timestamp"), "timestamp", low=0.0) / ticks_per_s
    prompt = fields.whole(fields.field(item, "input_length"), "input_length", low=1)
    answer = fields.whole(fields.field(item, "output_length"), "output_length")
    named = ("timestamp", "input_length", "output_length", "hash_ids")
    other = {key: value for key, value in item.items() if key not in named}
    blocks = _identifiers(fields.array(fields.field(item, "hash_ids"), "hash_ids"))
    complete, every = prompt // block_tokens, math.ceil(prompt / block_tokens)
    if len(blocks) not in (complete, every):  # the last, partial one may be left out
        raise fields.Damage(
            f"hash_ids names {len(blocks)} blocks, but a prompt of {prompt} tokens has "
            f"{every} of {block_tokens}"
        )
    return Request(arrival_s, prompt, answer, blocks, other or None)


def _identifiers(values: list[Any]) -> Sequence[int]:
    """Integers of 64 bits, looked at one by one only if need be, as there may be thousands."""
    try:
        if {*map(type, values)} <= {int}:
            return array("q", values)
    except OverflowError:
        pass
    low, high = -(1 << 63), (1 << 63) - 1
    return [fields.whole(value, "an id in hash_ids", low, high) for value in values]


def azure_request(line: str) -> Request:
    """One line of Azure's CSV, after the header, which may be a `Damage`."""
    try:
        cells = next(csv.reader([line.strip()]), [])
    except csv.Error as error:
        raise fields.Damage(f"this is not CSV ({error})") from None
    if len(cells) != len(AZURE_COLUMNS):
        raise fields.Damage(f"it has {len(cells)} cells instead of {len(AZURE_COLUMNS)}")
    match = _AZURE_TIME.fullmatch(cells[0].strip())
    try:
        if match is None:
            raise ValueError
        moment = datetime.fromisoformat(match[1] + (match[3] or ""))
    except ValueError:
        raise fields.Damage(f"TIMESTAMP is {cells[0]!r:.40} instead of a date and time") from None
    seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    counts = []
    for name, cell in zip(AZURE_COLUMNS[1:], cells[1:], strict=True):
        if not re.fullmatch(r"\d{1,12}", cell.strip(), re.ASCII):
            raise fields.Damage(f"{name} is {cell!r:.40} instead of a whole number")
        counts.append(int(cell))
    prompt = fields.whole(counts[0], "ContextTokens", low=1)
    arrival_s = seconds + float(match[2] or 0)
    return Request(arrival_s, prompt, fields.whole(counts[1], "GeneratedTokens"))


def shared_prefix_tokens(requests: Iterable[Request], block_tokens: int) -> int:
    """Prompt tokens that an earlier request had already: what an endless prefix cache saves.

    Requests are in order of arrival.  Their blocks have `block_tokens` tokens.
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
