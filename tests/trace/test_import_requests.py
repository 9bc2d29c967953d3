"""Logs of requests: lengths, arrivals in seconds, and what prompts share."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.core.errors import TraceError, UsageError
from arborsim.trace.importers.fields import Damage
from arborsim.trace.importers.requests import FORMATS, Request, read_requests, shared_prefix_tokens
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
def test_the_unit_of_time_is_the_formats(format: str, arrival_s: float) -> None:
    request_of, block_tokens, _ = FORMATS[format]
    blocks = -(-1030 // block_tokens)
    request = request_of(line(hash_ids=list(range(blocks)), chat_id=4, parent_chat_id=-1))
    assert isinstance(request, Request)
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
    for episode, (t, n, m, ids) in zip(reader.episodes(), given_requests, strict=True):
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
        longest = max(
            (sum(1 for k in range(len(words)) if words[: k + 1] == other[: k + 1])
             for other in prompts[:i]), default=0)  # fmt: skip
        expected += min(4 * longest, tokens)
    assert shared_prefix_tokens(made, 4) == expected


DAMAGE = {
    "not JSON": ("{", "not JSON"),
    "deep": ("[" * 100000, "not JSON"),
    "a list": ("[1]", "expected an object with timestamp"),
    "no output": (json.dumps({"timestamp": 1, "input_length": 5}), "output_length is missing"),
    "time as text": (line(timestamp="1"), "timestamp is '1' instead of a number"),
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
    "a block as text": (line(hash_ids=[1, "2", 3]), "an id in hash_ids is '2'"),
    "a block beyond 64 bits": (line(hash_ids=[1, 2, 1 << 63]), "an id in hash_ids is a huge"),
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
def test_damage_is_named(case: str) -> None:
    text, named = DAMAGE[case]
    with pytest.raises(Damage, match=re.escape(named)):
        FORMATS["mooncake"][0](text)


@pytest.mark.parametrize("case", AZURE_DAMAGE)
def test_damage_of_a_csv_is_named(case: str) -> None:
    text, named = AZURE_DAMAGE[case]
    with pytest.raises(Damage, match=re.escape(named)):
        FORMATS["azure"][0](text)


def test_a_csv_of_other_columns_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "log.csv"
    source.write_text("time,tokens\n1,2\n")
    with pytest.raises(UsageError, match="line 1: expected the header TIMESTAMP"):
        read_requests(source, "azure")


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
