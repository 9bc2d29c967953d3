"""DeFT's trees: the same nodes, lengths and children, level by level."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.trace.episode import Episode
from arborsim.trace.importers.fields import Damage
from arborsim.trace.importers.sources import read_list
from arborsim.trace.importers.trees import deft_search
from arborsim.trace.schema import Kind
from tests.trace.import_helpers import (
    Change,
    deft_tree,
    imported,
    parents,
    recording,
    rows,
    tokens_of,
)


def shape(tree: dict[int, list[int]], tokens: dict[int, int], node: int = 0) -> Any:
    """A tree without its numbers: own tokens, and the children's shapes in order."""
    return tokens[node], [shape(tree, tokens, child) for child in tree.get(node, [])]


def shape_of(episode: Episode) -> Any:
    tree: dict[int, list[int]] = {}
    for node, up in sorted(parents(episode).items()):
        if node:
            tree.setdefault(up, []).append(node)
    return shape(tree, tokens_of(episode))


def shape_in_source(item: dict[str, Any]) -> Any:
    nodes = item["data"].values()
    return shape(
        {node["id"]: node["children"] for node in nodes},
        {node["id"]: node["value"] for node in nodes},
    )


@settings(max_examples=12)
@given(seed=st.integers(0, 10**6), nodes=st.integers(1, 30))
def test_the_tree_is_the_sources(
    tmp_path_factory: pytest.TempPathFactory, seed: int, nodes: int
) -> None:
    item = deft_tree(seed, nodes)
    folder = tmp_path_factory.mktemp("deft")
    source = folder / "trees.json"
    source.write_text(json.dumps([item]))
    reader = imported(source, read_list(source, deft_search), folder / "out.parquet")
    episode = next(reader.episodes(text=True))
    assert shape_of(episode) == shape_in_source(item)
    assert episode.text is not None
    assert episode.text[0] == item["prompt"]
    # Positions are those of the source, which counts from the end of the prompt.
    first: dict[int, int] = {}
    for row, position in zip(episode.token_rows, episode.position, strict=True):
        first.setdefault(int(episode.node[row]), int(position))
    starts = sorted(
        node["start"] + item["data"]["0"]["value"] - 1 for node in item["data"].values()
    )
    assert sorted(first.values()) == starts
    # Given up are the leaves of every level but the deepest.
    pruned = set(episode.node[rows(episode, Kind.PRUNE)].tolist())
    up, depth = parents(episode), dict(zip(episode.node.tolist(), episode.depth, strict=True))
    leaves = set(up) - set(up.values()) - {0}
    assert pruned == {node for node in leaves if depth[node] < max(depth.values())}


def small() -> dict[str, Any]:
    def node(number: int, start: int, end: int, *children: int) -> dict[str, Any]:
        return {"id": number, "value": end - start + 1, "start": start, "end": end,
                "children": list(children)}  # fmt: skip

    data = {
        "0": node(0, -2, 0, 1, 2),
        "1": node(1, 1, 4),
        "2": node(2, 1, 1, 3),
        "3": node(3, 2, 5),
    }
    return {"incompleted": False, "prompt": "p", "data": data}


def on(number: str, **values: Any) -> Change:
    return lambda item: item["data"][number].update(values)


DAMAGE = {
    "incomplete": (lambda i: i.update(incompleted=True, data={}), "incomplete and has 0 nodes"),
    "no nodes": (lambda i: i.update(data={}), "no node 0"),
    "nodes as a list": (lambda i: i.update(data=[]), "data is not an object"),
    "not said whether complete": (lambda i: i.pop("incompleted"), "incompleted is missing"),
    "a child that is not there": (on("2", children=[3, 9]), "node 2 names child 9, which does not"),
    "a child twice": (on("2", children=[3, 3]), "node 3 is reached twice"),
    "two parents": (on("1", children=[3], value=1, end=1), "node 3 is reached twice"),
    "a loop": (on("3", children=[2]), "node 2 is reached twice"),
    "the prompt below": (on("3", children=[0]), "node 0 is reached twice"),
    "lost": (on("2", children=[]), "node 3 is no descendant"),
    "no tokens": (on("1", value=0), "node 1: value is 0"),
    "half a token": (on("1", value=0.5), "value is 0.5 instead of a whole number"),
    "true tokens": (on("1", value=True), "value is True instead"),
    "another length": (on("1", value=3), "3 tokens, but goes from 1 to 4"),
    "a gap": (on("3", start=3, end=6), "node 3 starts at 3, but node 2 above it ends at 1"),
    "a prompt that ends late": (on("0", start=-1, end=1), "the prompt ends at 1"),
    "another id": (on("1", id=7), "node 1 has id 7"),
    "children as text": (on("1", children="23"), "children is '23' instead of a list"),
    "a child as text": (on("0", children=["1", 2]), "a child is '1' instead"),
    "a node as a list": (lambda i: i["data"].update({"1": []}), "found a list"),
    "a huge node": (on("1", value=1 << 40, end=1 << 40), "value is 1099511627776"),
    "a prompt of numbers": (lambda i: i.update(prompt=[1]), "prompt is [1] instead of text"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named(case: str) -> None:
    item = small()
    assert deft_search(item).num_tokens == 12
    apply, named = DAMAGE[case]
    apply(item)
    with pytest.raises(Damage, match=re.escape(named)):
        deft_search(item)


@pytest.mark.parametrize(
    ("name", "limit", "damaged"),
    [("deft-set128-tot.json", 30, []), ("deft-keyword-tot.json", 55, ["item 2", "item 50"])],
)
def test_real_trees(name: str, limit: int, damaged: list[str], tmp_path: Path) -> None:
    source = recording(name)
    everything = json.loads(source.read_text())
    assert len(everything) == 100
    assert len(read_list(source, deft_search).searches) == 100 - len(damaged)
    contents = read_list(source, deft_search, limit)
    assert [item.split(":")[0] for item in contents.damaged] == damaged
    reader = imported(source, contents, tmp_path / "out.parquet")
    items = [item for item in everything[:limit] if not item["incompleted"]]
    assert reader.num_episodes == len(items) == limit - len(damaged)
    for episode, item in zip(reader.episodes(), items, strict=True):
        assert shape_of(episode) == shape_in_source(item)
    assert len(reader.info.extra["left_out"]) == len(damaged)
