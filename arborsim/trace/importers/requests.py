"""Requests to a served model: a prompt, an answer, an arrival, and prefixes that others share.

`request_logs` reads them from logs.  Here they become rows of a packed trace.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from arborsim.trace.columns import lists
from arborsim.trace.importers import searches
from arborsim.trace.schema import Kind
from arborsim.trace.writer import WholeTraceWriter

#: Most requests, and ids of prefix blocks, of a row group.
_GROUP_REQUESTS, _GROUP_BLOCKS = 1024, 1 << 20


@dataclass(frozen=True)
class Request(searches.Imported):
    """One request: a search without branches, whose answer is a block if it has tokens."""

    arrival_s: float  # on the source's clock; NaN if it is not known
    prompt_tokens: int
    answer_tokens: int
    #: Ids of the prompt's blocks, in order; requests share the tokens of equal leading ids
    prefix_blocks: Sequence[Any] = ()
    other: dict[str, Any] | None = None  # the source's other fields
    #: A session, and the seconds after its answer at which this request of it arrives
    after: tuple[Any, float] | None = None

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
    ids = [np.asarray(each.prefix_blocks, np.int64) for each in requests if each.prefix_blocks]
    other: list[str | None] = [None] * len(number)
    for at, request in zip(begins.tolist(), requests, strict=True):
        if request.other:
            other[at] = json.dumps(request.other, sort_keys=True)
    return {
        **columns,
        "prefix_blocks": lists(
            np.concatenate([np.empty(0, np.int64), *ids]), np.cumsum(lengths), lengths[1:] == 0
        ),
        "request": pa.array(other, pa.string()),
    }


def shared_prefix_tokens(requests: Iterable[Request], block_tokens: int) -> int:
    """Prompt tokens that an earlier request had already: what an endless prefix cache saves.

    Requests are in order of arrival.  Their blocks have `block_tokens` tokens, but for a prompt's
    last one, which may be shorter: of that, as many tokens are shared as were computed before.
    """
    seen: dict[Any, int] = {}  # block -> the most tokens of it that a prompt had
    saved = 0
    for request in requests:
        left, leading = request.prompt_tokens, True
        for block in request.prefix_blocks:
            tokens = min(block_tokens, left)
            left -= tokens
            known = seen.get(block, 0)
            if leading:
                saved += min(known, tokens)
                leading = known >= tokens
            if tokens > known:
                seen[block] = tokens
    return saved
