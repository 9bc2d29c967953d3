"""Calls of a model in files that hold text, or many calls in one object.

*Benchmarks* of vLLM (``vllm bench serve --save-detailed``) and SGLang (``--output-details``): one
object with a list of lengths.  *ShareGPT*: conversations in turns, of which each answer is a call.
*inspect_ai*: the model events of an evaluation's samples.  *OpenTelemetry*: spans that have the
``gen_ai`` attributes.

Prompts of text share what they begin with: their characters are cut into blocks, which are named
by a digest of all up to them.  How many characters a block has follows from the lengths of the
whole file, so that equal text is equal blocks.
"""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from arborsim.trace.importers import fields, sources
from arborsim.trace.importers.requests import Request
from arborsim.trace.importers.searches import Lengths


@dataclass(frozen=True)
class Call:
    """A prompt, as the messages that it is made of, and an answer; lengths where they are known."""

    arrival_s: float = math.nan
    prompt: Sequence[str] = ()
    answer: str = ""
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    other: dict[str, Any] = field(default_factory=dict)


def read(
    path: Path,
    items: Iterable[tuple[str, Any]],
    split: Callable[[Any], list[Call]],
    lengths: Lengths,
    block_tokens: int,
) -> tuple[sources.Contents[Request], str]:
    """The requests of all items, and where their lengths are from."""
    guessed = False

    def calls_of(item: Any) -> list[tuple[Call, Request]]:
        nonlocal guessed
        found = []
        for call in split(item):
            text = "".join(call.prompt)
            prompt, answer = call.prompt_tokens, call.answer_tokens
            guessed |= prompt is None or answer is None
            prompt = lengths.of(text) if prompt is None else prompt
            answer = lengths.of(call.answer) if answer is None else answer
            if prompt < 1:
                raise fields.Damage("a prompt has no tokens")
            found.append((call, Request(call.arrival_s, prompt, answer, (), call.other or None)))
        return found

    contents = sources.contents(path, items, calls_of)
    made = [request for _, request in contents.searches]
    texts = ["".join(call.prompt) for call, _ in contents.searches]
    characters = sum(map(len, texts))
    if characters:
        tokens = sum(r.prompt_tokens for r, text in zip(made, texts, strict=True) if text)
        size = max(1, round(block_tokens * characters / max(tokens, 1)))
        made = [
            Request(
                r.arrival_s,
                r.prompt_tokens,
                r.answer_tokens,
                _blocks(text, size, r.prompt_tokens // block_tokens),
                r.other,
            )
            for r, text in zip(made, texts, strict=True)
        ]
    said = lengths.said() if guessed else ""
    return sources.Contents(tuple(made), contents.damaged, contents.items), said


def _blocks(text: str, size: int, most: int) -> array[int]:
    """Ids of the whole blocks of `size` characters that a text begins with."""
    digest, ids = hashlib.blake2b(digest_size=8), array("q")
    for at in range(0, len(text) - size + 1, size):
        if len(ids) == most:
            break
        digest.update(text[at : at + size].encode("utf-8", "surrogatepass"))
        ids.append(int.from_bytes(digest.digest(), "little", signed=True))
    return ids


def of_benchmark(item: Any) -> list[Call]:
    """One run of vLLM's or SGLang's benchmark of a server."""
    prompts = fields.array(fields.field(item, "input_lens"), "input_lens")
    answers = fields.array(fields.field(item, "output_lens"), "output_lens")
    if not prompts or len(prompts) != len(answers):
        raise fields.Damage(
            f"{len(prompts)} input_lens and {len(answers)} output_lens: save the run with "
            "--save-detailed (vLLM) or --output-details (SGLang)"
        )
    starts, first, gaps = (
        fields.array(item.get(name) or [], name) for name in ("start_times", "ttfts", "itls")
    )
    starts = starts or [None] * len(prompts)
    calls: list[Call] = []
    for i, (prompt, answer, start) in enumerate(zip(prompts, answers, starts, strict=False)):
        other = {}
        if i < len(first) and i < len(gaps) and isinstance(gaps[i], list):
            ttft_s = fields.finite(first[i], f"ttfts, {i}", low=0.0)
            after_s = math.fsum(fields.finite(gap, f"itls, {i}", low=0.0) for gap in gaps[i])
            other = {"ttft_s": ttft_s, "e2e_s": ttft_s + after_s}
        arrival_s = math.nan if start is None else fields.finite(start, f"start_times, {i}")
        tokens = fields.whole(prompt, f"input_lens, {i}", low=1)
        calls.append(
            Call(arrival_s, (), "", tokens, fields.whole(answer, f"output_lens, {i}"), other)
        )
    return calls


def of_chat(item: Any) -> list[Call]:
    """A conversation of ShareGPT's: every answer in it, with all turns before it as its prompt."""
    turns = fields.array(fields.field(item, "conversations"), "conversations")
    said: list[str] = []
    calls: list[Call] = []
    for i, turn in enumerate(turns):
        at = f"turn {i}"
        who = fields.text(fields.field(turn, "from"), f"{at}: from")
        text = fields.text(fields.field(turn, "value"), f"{at}: value")
        if who in ("gpt", "chatgpt", "assistant", "bing", "bard") and said:
            calls.append(Call(prompt=tuple(said), answer=text, other={"turn": len(calls)}))
        said.append(f"\n{who}: {text}")
    return calls


def of_inspect(item: Any) -> list[Call]:
    """The model's calls in all samples of an inspect_ai log."""
    return [call for sample in samples_of(item) for call in sample]


def samples_of(item: Any) -> list[list[Call]]:
    """The model's calls of each sample of an inspect_ai log."""
    found = []
    for number, sample in enumerate(fields.array(fields.field(item, "samples"), "samples")):
        at = f"sample {number}"
        calls = [
            _event(event, f"{at}, event {i}")
            for i, event in enumerate(fields.array(fields.field(sample, "events"), f"{at}: events"))
            if isinstance(event, dict) and event.get("event") == "model"
        ]
        found.append(calls)
    return found


def _event(event: dict[str, Any], at: str) -> Call:
    output = fields.field(event, "output")
    choices = fields.array(fields.field(output, "choices") or [{}], f"{at}: choices")
    answer = message_text(_object(choices[0]).get("message"))
    usage = _object(output.get("usage"))
    prompt = [message_text(each) for each in fields.array(fields.field(event, "input"), at)]
    return Call(
        moment_of(event.get("timestamp")),
        prompt,
        answer,
        _tokens(usage.get("input_tokens"), at),
        _tokens(usage.get("output_tokens"), at),
        {"model": event.get("model")},
    )


def of_spans(item: Any) -> list[Call]:
    """The spans of an OTLP export that are calls of a model."""
    calls: list[Call] = []
    for span in _spans(item):
        said = {
            each["key"]: _attribute(each.get("value"))
            for each in fields.array(span.get("attributes") or [], "attributes")
            if isinstance(each, dict) and isinstance(each.get("key"), str)
        }
        if not any(name.startswith("gen_ai.usage.") for name in said):
            continue
        at = f"span {span.get('spanId', len(calls))!s:.20}"
        prompt_tokens, answer_tokens = (
            _tokens(said.get(f"gen_ai.usage.{now}", said.get(f"gen_ai.usage.{before}")), at)
            for now, before in (
                ("input_tokens", "prompt_tokens"),
                ("output_tokens", "completion_tokens"),
            )
        )
        prompt = said.get("gen_ai.input.messages") or said.get("gen_ai.prompt") or ()
        start = span.get("startTimeUnixNano")
        arrival_s = math.nan if start is None else fields.finite(_number(start), at) / 1e9
        names = {"trace": span.get("traceId"), "parent": span.get("parentSpanId") or None}
        answer = str(said.get("gen_ai.output.messages") or said.get("gen_ai.completion") or "")
        texts = [str(prompt)] if prompt else ()
        calls.append(Call(arrival_s, texts, answer, prompt_tokens, answer_tokens, names))
    return calls


def _spans(item: Any) -> Iterator[dict[str, Any]]:
    for resource in fields.array(fields.field(item, "resourceSpans"), "resourceSpans"):
        for scope in fields.array(fields.field(resource, "scopeSpans"), "scopeSpans"):
            for span in fields.array(fields.field(scope, "spans"), "spans"):
                if not isinstance(span, dict):
                    raise fields.Damage(f"a span is {fields.kind_of(span)}")
                yield span


def _attribute(value: Any) -> Any:
    """OTLP writes the type of a value as the name of its field, and whole numbers as text."""
    if not isinstance(value, dict) or not value:
        return None
    kind, held = next(iter(value.items()))
    return _number(held) if kind == "intValue" else held


def _number(value: Any) -> Any:
    if isinstance(value, str) and len(value) < 30 and value.isascii() and value.isdigit():
        return int(value)
    return value


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _tokens(value: Any, at: str) -> int | None:
    return None if value is None else fields.whole(value, f"{at}: tokens")


def message_text(message: Any) -> str:
    """A chat message as one text, with who said it."""
    if not isinstance(message, dict):
        return ""
    content = message.get("content", "")
    if not isinstance(content, str):
        content = json.dumps(content, sort_keys=True)
    calls = message.get("tool_calls")
    return f"\n{message.get('role', '')}: {content}" + (json.dumps(calls) if calls else "")


def moment_of(value: Any) -> float:
    """Seconds of an ISO date, NaN if there is none."""
    try:
        moment = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return math.nan
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
