"""Whatever stands in a recording: a search that readers accept, or a `Damage` in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.machine.lookup import load_geometry
from arborsim.trace.columns import encode
from arborsim.trace.decode import decode_episode
from arborsim.trace.importers.fields import Damage
from arborsim.trace.importers.request_logs import FORMATS, Reading, read_requests
from arborsim.trace.importers.requests import Request, packed_columns
from arborsim.trace.importers.searches import Imported, Lengths, WrittenSearch
from arborsim.trace.importers.tot import TotLog
from arborsim.trace.importers.trees import NestedTree, deft_search
from arborsim.trace.packed import expand
from arborsim.trace.schema import TraceInfo, arrow_schema
from arborsim.trace.validate import Where
from tests.trace.import_helpers import (
    deft_tree,
    nested_tree,
    tot_problem,
    tot_samples,
    tot_visits,
)

EXTRA = {"prefix_block_tokens": 512, "token_ids": "unknown"}
INFO = TraceInfo(load_geometry("chain"), "model", "task", "search", extra=EXTRA)
REQUEST = {"timestamp": 1.5, "input_length": 600, "output_length": 3, "hash_ids": [1, 2], "a": {}}

values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def places(item: Any) -> list[tuple[Any, Any]]:
    """Every container of a JSON value with each of its keys."""
    keys = item if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else ()
    return [place for key in keys for place in ((item, key), *places(item[key]))]


def damage(item: Any, data: st.DataObject) -> Any:
    """The item with one or two values replaced, or removed."""
    whole = {"item": json.loads(json.dumps(item))}
    for _ in range(data.draw(st.integers(1, 2))):
        container, key = data.draw(st.sampled_from(places(whole)))
        if data.draw(st.booleans()) or container is whole:
            container[key] = data.draw(values)
        else:
            del container[key]
    return whole["item"]


def search_or_damage(make: Callable[[Any], Imported], item: Any) -> None:
    try:
        search = make(item)
    except Damage as error:
        assert str(error)
        assert len(str(error)) < 300
        return
    if search.num_tokens > 10**5:
        return  # a prompt may be long: only its rows would take their time
    if isinstance(search, Request):
        packed = encode(packed_columns([search], 0), INFO, 0, arrow_schema(INFO, packed=True))
        table = expand(packed, Where("fuzz", 0))
    else:
        assert isinstance(search, WrittenSearch)
        table = encode(search.columns(), INFO, 0)
    episode = decode_episode(table, INFO, "fuzz", 0, text=True)
    assert episode.num_tokens == search.num_tokens


@settings(max_examples=60)
@given(seed=st.integers(0, 99), data=st.data())
def test_tree_of_thoughts_logs(seed: int, data: st.DataObject) -> None:
    log = TotLog(prompt_tokens=4)  # what is left of a problem may be a log without its text
    made = data.draw(st.sampled_from([tot_problem, tot_visits, tot_samples]))(seed)
    search_or_damage(log.search_of, damage(made, data))


@settings(max_examples=60)
@given(seed=st.integers(0, 99), depth_first=st.booleans(), data=st.data())
def test_nested_trees(seed: int, depth_first: bool, data: st.DataObject) -> None:
    reading = NestedTree(
        root="a.tree", value="v", value_scale=1.0, tokens="n", depth_first=depth_first
    )
    search_or_damage(reading.search_of, damage(nested_tree(seed), data))


@settings(max_examples=60)
@given(seed=st.integers(0, 99), data=st.data())
def test_trees(seed: int, data: st.DataObject) -> None:
    search_or_damage(deft_search, damage(deft_tree(seed, 6), data))


LOGS: dict[str, Any] = {
    "mooncake": REQUEST,
    "dynamo": {"event_type": "request_end", "request": {
        "request_received_ms": 5, "output_tokens": 3,
        "replay": {"trace_block_size": 16, "input_length": 33, "input_sequence_hashes": [1, 2]},
    }},
    "aiperf": {"metadata": {"request_start_ns": 10**18}, "metrics": {
        "input_sequence_length": {"value": 9}, "output_sequence_length": {"value": 2}}},
    "bench": {"input_lens": [3, 4], "output_lens": [1, 0], "start_times": [1.5, 2.5],
              "ttfts": [0.1, 0.2], "itls": [[0.1], []]},
    "sharegpt": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"},
                                   {"from": "human", "value": "?"}, {"from": "gpt", "value": "!"}]},
    "inspect": {"eval": {}, "samples": [{"events": [{
        "event": "model", "timestamp": "2025-01-01T00:00:00+00:00",
        "input": [{"role": "user", "content": "Hi"}],
        "output": {"choices": [{"message": {"role": "assistant", "content": "Ho"}}],
                   "usage": {"input_tokens": 40, "output_tokens": 3}},
    }]}]},
    "otel": {"resourceSpans": [{"scopeSpans": [{"spans": [{
        "spanId": "a", "traceId": "b", "startTimeUnixNano": "1700000000000000000", "attributes": [
            {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "7"}},
            {"key": "gen_ai.usage.output_tokens", "value": {"intValue": "2"}},
            {"key": "gen_ai.input.messages", "value": {"stringValue": "text"}}],
    }]}]}]},
}  # fmt: skip


@pytest.mark.parametrize("format", LOGS)
@settings(max_examples=25)
@given(data=st.data())
def test_requests(
    format: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    log = tmp_path_factory.getbasetemp() / f"{format}.jsonl"
    log.write_text(f"{json.dumps(LOGS[format])}\n{json.dumps(damage(LOGS[format], data))}\n")
    requests_or_damage(log, format)


def requests_or_damage(log: Path, format: str) -> None:
    reading = Reading(lengths=Lengths(tokens_per_character=0.25))
    found = read_requests(log, format, reading=reading)
    assert all(0 < len(said) < 300 for said in found.damaged)
    for request in found.searches:
        search_or_damage(lambda made: made, request)


@settings(max_examples=40)
@given(line=st.text() | st.from_regex(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d(\.\d+)?,\d+,\d+\Z"))
def test_csv(line: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    log = tmp_path_factory.getbasetemp() / "log.csv"
    log.write_text(",".join(FORMATS["azure"].needs) + f"\n2023-11-16 18:15:46,1,1\n{line}\n")
    requests_or_damage(log, "azure")
