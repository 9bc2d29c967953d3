"""Logs of requests: lengths, arrivals in seconds, and what prompts share."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.core.errors import TraceError, UsageError
from arborsim.trace.importers.request_logs import FORMATS, Reading, columns_of, read_requests
from arborsim.trace.importers.requests import Request, shared_prefix_tokens
from arborsim.trace.importers.searches import Lengths
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import KINDS
from tests.trace.import_helpers import imported, recording, tokens_of

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def line(**changes: Any) -> str:
    request = {"timestamp": 61500, "input_length": 1030, "output_length": 3, "hash_ids": [7, 8, 9]}
    return json.dumps({**request, **changes})


def table_of(reader: TraceReader, episode: int) -> pa.Table:
    return reader.table(episode)


def test_one_request_row_by_row(tmp_path: Path) -> None:
    source = tmp_path / "log.jsonl"
    source.write_text(line(input_length=2, output_length=2, hash_ids=[5], turn=1) + "\n\n")
    contents = read_requests(source, "mooncake")
    reader = imported(source, contents, tmp_path / "out.parquet", prefix_block_tokens=512)
    table = table_of(reader, 0).to_pydict()
    assert table["kind"] == ["prefill"] * 2 + ["transition"] + ["token"] * 2 + ["boundary"]
    assert table["iteration"] == [0, 0, 0, 1, 2, 2]
    assert table["position"] == [0, 1, None, 2, 3, None]
    assert table["token"] == [None] * 6
    assert table["arrival_s"] == [61.5] + [None] * 5
    assert table["prefix_blocks"] == [[5]] + [None] * 5
    assert table["request"] == ['{"turn": 1}'] + [None] * 5


@pytest.mark.parametrize(("format", "arrival_s"), [("mooncake", 61.5), ("bailian", 61500.0)])
def test_the_unit_of_time_is_the_formats(format: str, arrival_s: float, tmp_path: Path) -> None:
    blocks = -(-1030 // FORMATS[format].block_tokens)
    source = tmp_path / "log.jsonl"
    source.write_text(line(hash_ids=list(range(blocks)), chat_id=4, parent_chat_id=-1))
    (request,) = read_requests(source, format).searches
    assert (request.arrival_s, request.prompt_tokens, request.num_tokens) == (arrival_s, 1030, 1033)
    assert request.other == {"chat_id": 4, "parent_chat_id": -1}


def test_azure_in_both_of_its_spellings(tmp_path: Path) -> None:
    source = tmp_path / "log.csv"
    body = "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50+00:00,10,0\r\n"
    source.write_text("\ufeff" + AZURE.replace("\n", "\r\n") + body)
    contents = read_requests(source, "azure")
    first, second = contents.searches
    assert isinstance(first, Request)
    assert isinstance(second, Request)
    assert first.arrival_s == pytest.approx(1700158546.68059, abs=1e-6)
    assert second.arrival_s - first.arrival_s == pytest.approx(3.31941, abs=1e-6)
    reader = imported(source, contents, tmp_path / "out.parquet", prefix_block_tokens=0)
    episodes = list(reader.episodes())
    assert [tokens_of(episode) for episode in episodes] == [{0: 374, 1: 44}, {0: 10}]
    assert set(episodes[1].kind.tolist()) == {KINDS.index("prefill")}


requests = st.lists(
    st.tuples(
        st.integers(0, 10**7),
        st.integers(1, 60),
        st.integers(0, 5),
        st.lists(st.integers(0, 2), min_size=4, max_size=4),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=12)
@given(given_requests=requests)
def test_what_is_logged_is_what_the_trace_holds(
    tmp_path_factory: pytest.TempPathFactory, given_requests: list[Any]
) -> None:
    folder = tmp_path_factory.mktemp("requests")
    source = folder / "log.jsonl"
    lines = [
        json.dumps(
            {
                "timestamp": t,
                "input_length": n,
                "output_length": m,
                "hash_ids": ids[: -(-n // 16)],
                "turn": t,
            }
        )
        for t, n, m, ids in given_requests
    ]
    source.write_text("\n".join(lines))
    contents = read_requests(source, "bailian")
    reader = imported(source, contents, folder / "out.parquet", prefix_block_tokens=16)
    in_order = sorted(given_requests, key=lambda each: each[0])
    for episode, (t, n, m, ids) in zip(reader.episodes(), in_order, strict=True):
        assert tokens_of(episode) == ({0: n, 1: m} if m else {0: n})
        row = table_of(reader, episode.index).slice(0, 1).to_pylist()[0]
        assert row["arrival_s"] == t
        assert row["prefix_blocks"] == ids[: -(-n // 16)]
        assert json.loads(row["request"]) == {"turn": t}


@given(
    prompts=st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=8), last=st.integers(1, 4)
)
def test_shared_prefixes_are_those_of_some_earlier_prompt(
    prompts: list[list[int]], last: int
) -> None:
    # An id names its block and all before it, as the logs' hashes do.
    names: dict[tuple[int, ...], int] = {}
    made, expected = [], 0
    for i, words in enumerate(prompts):
        if not words:
            continue
        ids = tuple(names.setdefault(tuple(words[: k + 1]), len(names)) for k in range(len(words)))
        tokens = 4 * (len(words) - 1) + last
        made.append(Request(0.0, tokens, 1, ids))
        # No more than the earlier prompt had, whose last block may be a part of one.
        expected += max(
            (min(4 * sum(words[: k + 1] == other[: k + 1] for k in range(len(words))), tokens,
                 4 * (len(other) - 1) + last)
             for other in prompts[:i] if other), default=0)  # fmt: skip
    assert shared_prefix_tokens(made, 4) == expected


DAMAGE = {
    "not JSON": ("{}\n{", "not JSON"),
    "deep": ("{}\n" + "[" * 100000, "not JSON"),
    "a list": ("{}\n[1]", "expected an object with input_length"),
    "no output": (json.dumps({"timestamp": 1, "input_length": 5}), "output_length is missing"),
    "time as text": (line(timestamp="soon"), "timestamp is 'soon' instead of a date and time"),
    "no time": (line(timestamp=None), "timestamp is missing"),
    "time is no number": (line(timestamp=float("nan")), "timestamp is nan"),
    "time before the start": (line(timestamp=-1), "timestamp is -1"),
    "empty prompt": (line(input_length=0), "input_length is 0"),
    "half a token": (line(input_length=1.5), "input_length is 1.5"),
    "negative answer": (line(output_length=-1), "output_length is -1"),
    "endless": (line(input_length=10**12), "not between 1 and"),
    "endless together": (
        line(input_length=1 << 24, output_length=1 << 24, hash_ids=[0] * (1 << 15)), "tokens, more"
    ),
    "a block too few": (line(hash_ids=[1]), "names 1 blocks, but a prompt of 1030 tokens has 3"),
    "a block too many": (line(hash_ids=[1, 2, 3, 4]), "names 4 blocks"),
    "a block as a fraction": (line(hash_ids=[1, 2.5, 3]), "an id in hash_ids is 2.5"),
    "a block as a truth": (line(hash_ids=[1, True, 3]), "an id in hash_ids is True"),
}  # fmt: skip
AZURE_DAMAGE = {
    "a cell too few": ("2023-11-16 18:15:46,3", "2 cells instead of 3"),
    "no date": ("yesterday,3,4", "TIMESTAMP is 'yesterday'"),
    "no such date": ("2023-13-16 18:15:46,3,4", "TIMESTAMP is '2023-13-16"),
    "a fraction": ("2023-11-16 18:15:46,3.5,4", "ContextTokens is '3.5'"),
    "nothing generated is said": ("2023-11-16 18:15:46,3,", "GeneratedTokens is ''"),
    "an empty prompt": ("2023-11-16 18:15:46,0,4", "ContextTokens is 0"),
    "digits of another script": ("2023-11-16 18:15:46,٣,4", "ContextTokens is"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named(case: str, tmp_path: Path) -> None:
    text, named = DAMAGE[case]
    source = tmp_path / "log.jsonl"
    source.write_text(text)
    assert named in read_requests(source, "mooncake").damaged[-1]


@pytest.mark.parametrize("case", AZURE_DAMAGE)
def test_damage_of_a_csv_is_named(case: str, tmp_path: Path) -> None:
    text, named = AZURE_DAMAGE[case]
    source = tmp_path / "log.csv"
    source.write_text(AZURE + text)
    assert named in read_requests(source, "azure").damaged[-1]


def test_a_csv_of_other_columns_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "log.csv"
    source.write_text("time,tokens\n1,2\n")
    with pytest.raises(UsageError, match="line 1: no column ContextTokens"):
        read_requests(source, "azure")
    with pytest.raises(UsageError, match=r"columns time, tokens\): say which .* --field arrival"):
        read_requests(source)


def test_null_tokens_are_damage_where_ids_are_known(tmp_path: Path) -> None:
    source = tmp_path / "log.jsonl"
    source.write_text(line())
    contents = read_requests(source, "mooncake")
    reader = imported(source, contents, tmp_path / "out.parquet", prefix_block_tokens=512)
    assert next(reader.episodes()).num_tokens == 1033
    reader.info.extra["token_ids"] = "known"
    with pytest.raises(TraceError, match="token -1 is not in the vocabulary"):
        next(reader.episodes())


def test_mooncakes_conversations(tmp_path: Path) -> None:
    source = recording("mooncake-conversation.jsonl")
    block_tokens = FORMATS["mooncake"].block_tokens
    everything = read_requests(source, "mooncake")
    assert (len(everything.searches), everything.damaged) == (12031, ())
    assert sum(search.num_tokens for search in everything.searches) == 144793823 + 4122048
    first = read_requests(source, "mooncake", limit=20)
    reader = imported(source, first, tmp_path / "out.parquet", prefix_block_tokens=block_tokens)
    logged = [json.loads(text) for text in source.read_text().split("\n")[:20]]
    assert reader.num_episodes == 20
    for episode, item in zip(reader.episodes(), logged, strict=True):
        assert tokens_of(episode) == {0: item["input_length"], 1: item["output_length"]}
        row = table_of(reader, episode.index).slice(0, 1).to_pylist()[0]
        assert row["arrival_s"] == item["timestamp"] / 1000
        assert row["prefix_blocks"] == item["hash_ids"]


FIELD = {
    "case09/mc-unsorted": (700, 1800, ("sorted",)),  # 38.9% by arrival
    "case09/mc-ok": (655, 1855, ()),  # 35.3%: the earlier prompt has no more
    "case10/mc-nohash": (0, 1855, ()),
    "case10/mc-session": (655, 1855, ("1 of 2 requests follow an answer",)),
    "case10/mc-strhash": (0, 700, ()),
    "case10/mc-u64": (0, 700, ()),
}


@pytest.mark.parametrize("case", FIELD)
def test_logs_of_the_field(case: str) -> None:
    saved, whole, notes = FIELD[case]
    log = read_requests(recording(f"field/{case}.jsonl"))
    assert log.format == "mooncake"
    assert sum(each.prompt_tokens for each in log.searches) == whole
    assert shared_prefix_tokens(log.searches, log.block_tokens) == saved
    assert all(said in note for said, note in zip(notes, log.notes, strict=True))


def test_a_session_waits_for_its_answer(tmp_path: Path) -> None:
    source = tmp_path / "log.jsonl"
    rows = [
        {"session_id": "a", "timestamp": 1000, "input_length": 9, "output_length": 10},
        {"session_id": "b", "timestamp": 1100, "input_length": 8, "output_length": 1},
        {"session_id": "a", "delay": 300, "input_length": 7, "output_length": 2},
    ]
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    log = read_requests(source, reading=Reading(token_s=0.05))
    assert [each.prompt_tokens for each in log.searches] == [9, 8, 7]
    assert log.searches[2].arrival_s == pytest.approx(1.0 + 10 * 0.05 + 0.3)


KNOWN = {  # format -> a small log, and its requests: arrival, prompt, answer
    "azure": ("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:01.5+00:00,9,2\n"
              "2024-05-10 00:00:00+00:00,7,0\n", [(0, 7, 0), (1.5, 9, 2)]),
    "burstgpt": ("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
                 "5,ChatGPT,472,18,490,Conversation log\n45.5,GPT-4,10,0,10,API log\n",
                 [(5, 472, 18), (45.5, 10, 0)]),
    "vidur": ("arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,32,8\n", [(0.5, 32, 8)]),
    "dynamo": ('{"event_type": "tool"}\n{"event_type": "request_end", "request": {'
               '"request_received_ms": 2000, "output_tokens": 3, "replay": {"trace_block_size": 2,'
               '"input_length": 3, "input_sequence_hashes": [11, 18446744073709551557]}}}\n',
               [(2, 3, 3)]),
    "aiperf": ('{"metadata": {"request_start_ns": 3000000000}, "metrics": {"input_sequence_length":'
               '{"value": 5, "unit": "tokens"}, "output_sequence_length": {"value": 2}}}\n'
               '{"metadata": {"request_start_ns": 1}, "metrics": {}, "error": {"code": 500}}\n',
               [(3, 5, 2)]),
    "bench": ('{"input_lens": [100, 200], "output_lens": [3, 2], "ttfts": [0.1, 0.2],'
              '"itls": [[0.05, 0.07], [0.1]], "start_times": [10.0, 11.5]}',
              [(10, 100, 3), (11.5, 200, 2)]),
    "sharegpt": (json.dumps([{"conversations": [
        {"from": "human", "value": "x" * 91}, {"from": "gpt", "value": "y" * 40},
        {"from": "human", "value": "z" * 93}, {"from": "gpt", "value": "w" * 8}]}]),
        [(None, 25, 10), (None, 62, 2)]),
    "inspect": (json.dumps({"eval": {}, "samples": [{"events": [{"event": "info"}, {
        "event": "model", "timestamp": "1970-01-01T00:00:02Z", "input": [{"role": "user",
        "content": "Hi"}], "output": {"choices": [], "usage": {"input_tokens": 4,
        "output_tokens": 1}}}]}]}), [(2, 4, 1)]),
    "otel": (json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [
        {"spanId": "a", "startTimeUnixNano": "5000000000", "attributes": [
            {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "7"}},
            {"key": "gen_ai.usage.output_tokens", "value": {"intValue": "2"}}]},
        {"spanId": "b", "attributes": []}]}]}]}), [(5, 7, 2)]),
}  # fmt: skip


@pytest.mark.parametrize("format", KNOWN)
def test_formats_are_recognised(format: str, tmp_path: Path) -> None:
    text, expected = KNOWN[format]
    source = tmp_path / "a log"
    source.write_bytes(gzip.compress(text.encode()) if format == "dynamo" else text.encode())
    log = read_requests(source, reading=Reading(lengths=Lengths(tokens_per_character=0.25)))
    assert (log.format, log.damaged) == (format, ())
    start = 1715299200.0 if format == "azure" else 0.0
    found = [(each.arrival_s - start, each.prompt_tokens, each.answer_tokens)
             for each in log.searches]  # fmt: skip
    assert [each[1:] for each in found] == [each[1:] for each in expected]
    for (at, *_), (known, *_) in zip(found, expected, strict=True):
        assert math.isnan(at) if known is None else at == pytest.approx(known)
    if format == "sharegpt":  # the second prompt begins with the first
        assert shared_prefix_tokens(log.searches, log.block_tokens) == 16


def test_columns_can_be_named(tmp_path: Path) -> None:
    source = tmp_path / "log.csv"
    source.write_text("when;in;out;blocks\n2500;20;3.0;a|b\n1000;33;1;a|b|c\n")
    reading = Reading(columns=columns_of("arrival=when,prompt=in,output=out,prefix=blocks"),
                      unit="ms", block_tokens=16)  # fmt: skip
    log = read_requests(source, reading=reading)
    assert [(each.arrival_s, each.answer_tokens) for each in log.searches] == [(1, 1), (2.5, 3)]
    assert shared_prefix_tokens(log.searches, 16) == 20
    with pytest.raises(UsageError, match="--block-tokens says how many"):
        read_requests(source, reading=replace(reading, block_tokens=0))
    with pytest.raises(UsageError, match="say which column is output, too"):
        columns_of("prompt=in")


def test_text_needs_a_tokenizer_or_a_rate(tmp_path: Path) -> None:
    source = tmp_path / "chat.json"
    source.write_text(KNOWN["sharegpt"][0])
    with pytest.raises(UsageError, match=r"--tokenizer FILE, or say a rate .* prose"):
        read_requests(source)
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"[UNK]": 0}, "[UNK]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.save(str(tmp_path / "tokenizer.json"))
    lengths = Lengths(tokenizer=str(tmp_path))
    log = read_requests(source, reading=Reading(lengths=lengths))
    assert [each.answer_tokens for each in log.searches] == [40, 8]
