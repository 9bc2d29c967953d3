"""The known formats of logs of requests: where each has arrivals, lengths and prefix blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from arborsim.trace.importers import conversations


def found_at(row: Any, path: str) -> Any:
    """The value at a path, None if it is not there.  A measurement stands for its ``value``."""
    for name in path.split("."):
        row = row.get(name) if isinstance(row, dict) else None
    return row.get("value") if isinstance(row, dict) and "value" in row else row


@dataclass(frozen=True)
class Columns:
    """Where a row has what.  ``a.b`` is b in a, and ``a|b`` the first of two that is there."""

    prompt: str
    output: str
    arrival: str = ""
    prefix: str = ""  # ids of the prompt's blocks
    session: str = ""
    delay: str = ""  # from the answer to the session's request before


@dataclass(frozen=True)
class Format:
    """A known format: its columns, and those by which it is recognised."""

    columns: Columns
    needs: tuple[str, ...]
    unit: str = "s"
    block_tokens: int = 0  # of a prefix block; 0 for none
    block_column: str = ""  # where a row says it
    wanted: Callable[[Any], bool] = lambda row: True  # rows that are requests
    split: Callable[[Any], list[conversations.Call]] | None = None  # objects that hold several


_LENGTHS = ("input_length", "output_length")
_MOONCAKE = Columns("input_length", "output_length", "timestamp", "hash_ids", "session_id", "delay")
_DYNAMO = Columns(
    "request.replay.input_length|request.input_tokens",
    "request.output_tokens",
    "request.request_received_ms|event_time_unix_ms",
    "request.replay.input_sequence_hashes",
    "agent_context.session_id",
)
_AIPERF = Columns(
    "metrics.input_sequence_length",
    "metrics.output_sequence_length|metrics.output_token_count",
    "metadata.request_start_ns|metadata.timestamp_ns",
    "",
    "metadata.conversation_id",
)
_CALLS = Columns("", "")

#: By name, the more particular first: Bailian's rows have Mooncake's columns, too.
FORMATS: Mapping[str, Format] = {
    "azure": Format(
        Columns("ContextTokens", "GeneratedTokens", "TIMESTAMP"),
        ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    ),
    "burstgpt": Format(
        Columns("Request tokens", "Response tokens", "Timestamp"),
        ("Timestamp", "Request tokens", "Response tokens"),
    ),
    "vidur": Format(
        Columns("num_prefill_tokens", "num_decode_tokens", "arrived_at"),
        ("num_prefill_tokens", "num_decode_tokens"),
    ),
    "bailian": Format(
        replace(_MOONCAKE, session="", delay=""),
        ("chat_id", "timestamp", *_LENGTHS),
        block_tokens=16,
    ),
    "mooncake": Format(_MOONCAKE, _LENGTHS, "ms", 512),
    "dynamo": Format(
        _DYNAMO,
        ("event_type",),
        "ms",
        block_column="request.replay.trace_block_size",
        wanted=lambda row: row.get("event_type") == "request_end",
    ),
    "aiperf": Format(
        _AIPERF,
        ("metadata", "metrics"),
        "ns",
        wanted=lambda row: (
            not row.get("error") and found_at(row, "metadata.credit_phase") != "warmup"
        ),
    ),
    "bench": Format(_CALLS, ("input_lens", "output_lens"), split=conversations.of_benchmark),
    "sharegpt": Format(_CALLS, ("conversations",), split=conversations.of_chat),
    "inspect": Format(_CALLS, ("eval", "samples"), split=conversations.of_inspect),
    "otel": Format(_CALLS, ("resourceSpans",), split=conversations.of_spans),
}
