"""Trees of nested objects: the same nodes, edges, lengths and values, in the order asked for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.core.errors import UsageError
from arborsim.products.traces.describe import episode_facts
from arborsim.trace.episode import Episode
from arborsim.trace.importers.fields import Damage
from arborsim.trace.importers.sources import read_objects
from arborsim.trace.importers.trees import NestedTree
from arborsim.trace.schema import Kind
from tests.trace.import_helpers import imported, nested_tree, parents, recording, rows, tokens_of

READING = {"root": "a.tree", "value": "v", "tokens": "n"}


def read(path: Path, written: str, reading: NestedTree) -> list[Episode]:
    path.mkdir(exist_ok=True)
    source = path / "trees.json"
    source.write_text(written)
    contents = read_objects(source, reading.search_of)
    reader = imported(source, contents, path / "out.parquet", ends="unknown")
    return list(reader.episodes(text=True))


def shape(node: dict[str, Any]) -> Any:
    """A node as the source has it: tokens, text, value, and its children in order."""
    below = [shape(child) for child in node.get("children", [])]
    return node["n"], node["text"], node.get("v"), below


def shape_of(episode: Episode) -> Any:
    assert episode.text is not None
    up, tokens = parents(episode), tokens_of(episode)
    value: dict[int, float | None] = {}
    written: dict[int, str | None] = {0: episode.text[0]}
    for row in rows(episode, Kind.BOUNDARY):
        node, reward = int(episode.node[row]), float(episode.reward[row])
        value[node] = None if np.isnan(reward) else reward
        written[node] = episode.text[row]

    def of(node: int) -> Any:
        below = [of(child) for child in sorted(up) if child and up[child] == node]
        return tokens[node], written[node], value.get(node), below

    return of(0)


def without_value(found: Any) -> Any:
    """The root's value is no thought's."""
    return found[0], found[1], None, found[3]


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), depth_first=st.booleans())
def test_the_tree_is_the_sources(
    tmp_path_factory: pytest.TempPathFactory, seed: int, depth_first: bool
) -> None:
    item = nested_tree(seed)
    reading = NestedTree(**READING, depth_first=depth_first)
    (episode,) = read(tmp_path_factory.mktemp("tree"), json.dumps([item]), reading)
    assert shape_of(episode) == without_value(shape(item["a"]["tree"]))
    opened = [int(episode.node[row]) for row in rows(episode, Kind.TRANSITION)]
    assert opened == sorted(opened)
    up = parents(episode)
    depth = dict(zip(episode.node.tolist(), episode.depth.tolist(), strict=True))
    order = [depth[node] for node in opened]
    turns = episode_facts(episode).transitions
    if not depth_first:
        assert order == sorted(order)  # level by level
        assert turns == len(set(order))
    else:  # preorder: a child follows its parent, or the subtree of its elder sibling
        assert turns == len(opened)
        for node in opened:
            assert up[node] in ancestors(node - 1, up)
    leaves = {node for node in opened if node not in up.values()}
    pruned = {int(episode.node[row]) for row in rows(episode, Kind.PRUNE)}
    if depth_first:  # all but the path to the last node
        assert pruned == set(opened) - set(ancestors(len(opened), up))
    else:
        assert pruned == {node for node in leaves if depth[node] < max(order)}


def ancestors(node: int, up: dict[int, int]) -> list[int]:
    found = []
    while node >= 0:
        found.append(node)
        node = up[node]
    return found


ITEMS = [nested_tree(seed) for seed in range(3)]


@pytest.mark.parametrize(
    "written",
    [
        json.dumps(ITEMS),
        json.dumps(ITEMS, indent=2),
        "".join(f"{json.dumps(item)}\n" for item in ITEMS),
        "\n" + "\n\n".join(json.dumps(item) for item in ITEMS),
    ],
)
def test_a_list_or_a_line_each(written: str, tmp_path: Path) -> None:
    found = read(tmp_path, written, NestedTree(**READING))
    assert [shape_of(each) for each in found] == [
        without_value(shape(item["a"]["tree"])) for item in ITEMS
    ]


@pytest.mark.parametrize("indent", [None, 2])
def test_one_object_is_one_tree(indent: int | None, tmp_path: Path) -> None:
    (found,) = read(tmp_path, json.dumps(ITEMS[0], indent=indent), NestedTree(**READING))
    assert shape_of(found) == without_value(shape(ITEMS[0]["a"]["tree"]))


def test_lengths_of_texts(tmp_path: Path) -> None:
    item = {"text": "12345678", "children": [{"text": "1234"}, {"text": ""}]}
    reading = NestedTree(tokens_per_character=0.5)
    (episode,) = read(tmp_path, json.dumps(item), reading)
    assert tokens_of(episode) == {0: 4, 1: 2, 2: 1}
    given = NestedTree(text="", prompt_tokens=9)
    (episode,) = read(tmp_path / "given", json.dumps(item), given)
    assert tokens_of(episode) == {0: 9, 1: 1, 2: 1}
    with pytest.raises(UsageError, match="--prompt-tokens"):
        NestedTree(text="").search_of(item)


TREE: dict[str, Any] = {"text": "a", "children": [{"text": "b"}, {"text": "c", "children": []}]}


def on(*place: Any, to: Any) -> dict[str, Any]:
    item: Any = json.loads(json.dumps(TREE))
    at = item
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = to
    found: dict[str, Any] = item
    return found


DAMAGE: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no object": ([1], {}, "the root is a list instead of an object"),
    "no root": (TREE, {"root": "b"}, "the tree: b is missing"),
    "no object on the way": (TREE, {"root": "text.x"}, "expected an object with x, found text"),
    "no text": (TREE, {"text": "said"}, "the root: said is missing"),
    "a node without text": (on("children", 1, to={}), {}, "node 1: text is missing"),
    "below": (on("children", 1, "children", to=[{"text": 5}]), {}, "node 1.0: text is 5 instead"),
    "a node as text": (on("children", 0, to="b"), {}, "node 0: expected an object with text"),
    "children as text": (on("children", to="bc"), {}, "the root: children is 'bc' instead of"),
    "children of a child": (
        on("children", 0, "children", to={}), {}, "node 0: children is {} instead of a list",
    ),
    "a value as text": (
        on("children", 0, "v", to="1"), {"value": "v"}, "node 0: v is '1' instead of a number",
    ),
    "a value beyond": (on("children", 0, "v", to=2), {"value": "v"}, "v is 2, more than 1"),
    "no tokens": (on("n", to=0), {"tokens": "n"}, "the root: n is 0"),
    "half a token": (on("n", to=0.5), {"tokens": "n"}, "n is 0.5 instead of a whole number"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
@pytest.mark.parametrize("depth_first", [False, True])
def test_damage_is_named(case: str, depth_first: bool) -> None:
    item, options, named = DAMAGE[case]
    with pytest.raises(Damage, match=re.escape(named)):
        NestedTree(**options, depth_first=depth_first).search_of(item)


def test_a_line_that_is_no_object_is_named(tmp_path: Path) -> None:
    source = tmp_path / "trees.jsonl"
    source.write_text(f"{json.dumps(TREE)}\n[]\n{{\n")
    contents = read_objects(source, NestedTree().search_of)
    assert contents.damaged == (
        "line 2: the root is a list instead of an object",
        "line 3: the root is null instead of an object",
    )


def test_openrs_trees_are_the_sources(tmp_path: Path) -> None:
    source = recording("openr-omegaprm-math.jsonl")
    reading = NestedTree(root="reasoning_steps", value="mc_value", tokens_per_character=0.3)
    contents = read_objects(source, reading.search_of)
    reader = imported(source, contents, tmp_path / "out.parquet", ends="unknown")
    lines = [json.loads(line) for line in source.read_text().splitlines() if line]
    sizes = []
    for episode, item in zip(reader.episodes(text=True), lines, strict=True):

        def of(node: dict[str, Any]) -> Any:
            tokens = max(1, round(0.3 * len(node["text"])))
            value = float(np.float32(node["mc_value"]))
            return tokens, node["text"], value, [of(child) for child in node["children"]]

        assert shape_of(episode) == without_value(of(item["reasoning_steps"]))
        sizes.append((episode_facts(episode).nodes, episode_facts(episode).depth))
    assert sizes == [(143, 4), (90, 3), (24, 3)]
