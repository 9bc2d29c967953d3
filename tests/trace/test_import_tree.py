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
from arborsim.trace.importers.trees import NestedTree
from arborsim.trace.schema import Kind
from tests.trace.import_helpers import imported, nested_tree, parents, recording, rows, tokens_of

READING = {"root": "a.tree", "value": "v", "tokens": "n", "value_scale": 1.0}


def read(path: Path, written: str, reading: NestedTree) -> list[Episode]:
    path.mkdir(exist_ok=True)
    source = path / "trees.json"
    source.write_text(written)
    contents = reading.read(source)[0]
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
        on("children", 0, "children", to=5), {}, "node 0: children is 5 instead of a list",
    ),
    "a value as text": (
        on("children", 0, "v", to="1"), {"value": "v"}, "node 0: v is '1' instead of a number",
    ),
    "a value beyond": (
        on("children", 0, "v", to=2), {"value": "v", "value_scale": 1.0}, "is 2, more than 1",
    ),
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
    contents = NestedTree().read(source)[0]
    assert contents.damaged == (
        "line 2: the root is a list instead of an object",
        "line 3: the root is null instead of an object",
    )


def test_openrs_trees_are_the_sources(tmp_path: Path) -> None:
    source = recording("openr-omegaprm-math.jsonl")
    reading = NestedTree(root="reasoning_steps", value="mc_value", tokens_per_character=0.3)
    contents = reading.read(source)[0]
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


def trees(path: Path, items: Any, **reading: Any) -> tuple[list[Any], str]:
    """Each search of a source: its prompt's tokens, and parent, tokens, reward of its thoughts."""
    source = path / "trees.json"
    source.write_text(items if isinstance(items, str) else json.dumps(items))
    found, said = NestedTree(tokens_per_character=1.0, **reading).read(source)
    assert not found.damaged
    return [
        (search.prompt_tokens, [(t.parent, t.tokens, round(t.reward, 3) if t.reward == t.reward
                                 else None) for b in search.batches for t in b.thoughts])
        for search in found.searches
    ], said  # fmt: skip


def test_flat_nodes_are_one_search() -> None:
    reading = NestedTree(tokens_per_character=1.0, value="Q")
    found, said = reading.read(recording("field/case08/flat.json"))
    (search,) = found.searches
    assert (found.damaged, said) == ((), "")
    assert search.prompt_text == "problem"
    thoughts = [thought for batch in search.batches for thought in batch.thoughts]
    assert [(t.parent, t.text, t.reward) for t in thoughts] == [
        (0, "step one", 0.5), (0, "other step", 0.2), (1, "step two", 0.9)]  # fmt: skip


def test_flat_nodes_may_lie_in_an_item_in_any_order(tmp_path: Path) -> None:
    nodes = [{"node_id": "b", "parent": "a", "text": "22"}, {"node_id": "a", "text": "1"}]
    found, _ = trees(tmp_path, [{"nodes": nodes}], root="nodes")
    assert found == [(1, [(0, 2, None)])]
    two = [*nodes, {"node_id": "c", "parent": None, "text": "333"}]
    assert [each[0] for each in trees(tmp_path, two)[0]] == [1, 3]


FLAT_DAMAGE = {
    "names parent 7, which is not there": [{"id": 1, "parent_id": 7}],
    "node 1 is there twice": [{"id": 1, "parent_id": None}, {"id": 1, "parent_id": 1}],
    "below themselves": [{"id": 1, "parent_id": 2}, {"id": 2, "parent_id": 1}],
    "nothing in it has the field 'children': name": [{"text": "a"}, {"text": "b"}],
}


@pytest.mark.parametrize("named", FLAT_DAMAGE)
def test_what_is_no_tree_is_refused(named: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(named)):
        trees(tmp_path, FLAT_DAMAGE[named])


def test_children_may_be_an_object(tmp_path: Path) -> None:
    item = {"text": "1", "children": {"left": {"text": "22"}, "right": {"text": "333"}}}
    assert trees(tmp_path, item)[0] == [(1, [(0, 2, None), (0, 3, None)])]


def test_values_beyond_one_are_spread_over_rewards(tmp_path: Path) -> None:
    item = {"text": "1", "children": [{"text": "2", "v": -1}, {"text": "3", "v": 3}, {"text": "4",
            "v": 0}]}  # fmt: skip
    found, said = trees(tmp_path, item, value="v")
    assert [reward for *_, reward in found[0][1]] == [0.0, 1.0, 0.25]
    assert said == "values from -1 to 3 are rewards from 0 to 1"
    item["children"] = [{"text": "2", "v": 0.5}]
    assert trees(tmp_path, item, value="v") == ([(1, [(0, 1, 0.5)])], "")


def test_completions_share_their_beginnings(tmp_path: Path) -> None:
    item = {"problem": "12345", "completions": ["aa\n\nbbb", "aa\n\nc\n\nanswer"],
            "scores": [[0.5, 0.25], [0.5, 0.75]]}  # fmt: skip
    found, _ = trees(tmp_path, f"{json.dumps(item)}\n{json.dumps(item)}\n")
    # The last scored step of the second one has its answer.
    assert found == 2 * [(5, [(0, 2, 0.5), (1, 3, 0.25), (1, 9, 0.75)])]


def test_calls_of_a_sample_share_their_messages(tmp_path: Path) -> None:
    def call(*said: str) -> dict[str, Any]:
        chat = [{"role": "user", "content": each} for each in said]
        output = {"choices": [{"message": {"role": "assistant", "content": "A"}}], "usage": {}}
        return {"event": "model", "input": chat, "output": output}

    log = {"eval": {}, "samples": [{"events": [call("q"), call("q", "x"), call("q", "y")]}]}
    ((prompt, thoughts),), _ = trees(tmp_path, log)
    assert prompt == len("\nuser: q")
    parents = [parent for parent, *_ in thoughts]
    assert parents == [0, 0, 0, 2, 3]  # an answer, two messages, and an answer to each


def test_stored_blocks_are_trees_of_prefixes(tmp_path: Path) -> None:
    def stored(parent: Any, *hashes: Any) -> dict[str, Any]:
        return {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent,
                "token_ids": [], "block_size": 16}  # fmt: skip

    big = 18446744073709551557
    lines = [
        {"ts": 1.0, "events": [stored(None, big, 2), {"type": "AllBlocksCleared"}]},
        {"ts": 2.0, "events": [stored(2, 3), stored(2, 4, 5), stored(None, big, 2)]},
        [3.0, [["BlockStored", ["x"], None, [], 16]]],
    ]  # fmt: skip
    found, _ = trees(tmp_path, "".join(f"{json.dumps(line)}\n" for line in lines))
    assert found == [(32, [(0, 16, None), (0, 32, None)]), (16, [])]
