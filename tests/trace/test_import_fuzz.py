"""Whatever stands in a recording: a search that readers accept, or a `Damage` in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.machine.lookup import load_geometry
from arborsim.trace.columns import encode
from arborsim.trace.decode import decode_episode
from arborsim.trace.importers.fields import Damage
from arborsim.trace.importers.requests import FORMATS, Request, packed_columns
from arborsim.trace.importers.searches import Imported, WrittenSearch
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
    reading = NestedTree(root="a.tree", value="v", tokens="n", depth_first=depth_first)
    search_or_damage(reading.search_of, damage(nested_tree(seed), data))


@settings(max_examples=60)
@given(seed=st.integers(0, 99), data=st.data())
def test_trees(seed: int, data: st.DataObject) -> None:
    search_or_damage(deft_search, damage(deft_tree(seed, 6), data))


@settings(max_examples=60)
@given(data=st.data())
def test_requests(data: st.DataObject) -> None:
    search_or_damage(FORMATS["mooncake"][0], json.dumps(damage(REQUEST, data)))


@settings(max_examples=60)
@given(line=st.text() | st.from_regex(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d(\.\d+)?,\d+,\d+\Z"))
def test_csv(line: str) -> None:
    search_or_damage(FORMATS["azure"][0], line)
