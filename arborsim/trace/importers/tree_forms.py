"""Trees in other forms, made into nested objects for `trees.NestedTree`.

*Flat*: a list of nodes that name their parents; each node without one begins a search.
*search-and-learn*: a problem with completions, whose steps have scores.  Equal beginnings are one
thought.  *inspect_ai*: the messages of a sample's calls, with equal beginnings as one.  *KV events*
of vLLM and SGLang: blocks that are stored behind a parent, as trees of prefixes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from arborsim.trace.importers.conversations import samples_of
from arborsim.trace.importers.fields import Damage, array, field, text, whole

#: Names of the fields that flat nodes may have.
IDS = ("id", "node_id", "nodeId", "uid", "uuid", "key")
PARENTS = ("parent_id", "parent", "parentId", "parent_node_id", "parent_uid", "parent_node")

Items = list[tuple[str, Any]]


def flat(nodes: Sequence[Any], names: tuple[str, str], children: str) -> list[dict[str, Any]]:
    """The roots of nodes that name their parents, each with its children in a list.

    A `Damage` if a node or its parent is missing, is there twice, or is below itself.
    """
    own, up = names
    made: dict[Any, dict[str, Any]] = {}
    for node in nodes:
        number = field(node, own)
        if not isinstance(number, int | str):
            raise Damage(f"{own} is {number!r:.40} instead of a number or text")
        if number in made:
            raise Damage(f"node {number!s:.40} is there twice")
        made[number] = {**node, children: []}
    roots = []
    for number, node in made.items():
        parent = node.get(up)
        if parent in (None, "") or (parent == -1 and -1 not in made):
            roots.append(node)
        elif not isinstance(parent, int | str) or parent not in made:
            raise Damage(f"node {number!s:.40} names parent {parent!r:.40}, which is not there")
        else:
            made[parent][children].append(node)
    waiting = list(roots)
    for node in waiting:  # grows
        waiting.extend(node[children])
    if len(waiting) < len(made):
        raise Damage("some nodes are below themselves: this is no tree")
    return roots


def names_of(item: Any, own: str, up: str, children: str) -> tuple[str, str] | None:
    """The fields in which a flat node has its name and its parent's; None if it is not flat."""
    if not isinstance(item, dict) or (children in item and not up):
        return None
    own = own or next((name for name in IDS if name in item), "")
    up = up or next((name for name in PARENTS if name in item), "")
    return (own, up) if own and up else None


def recognised(items: Items) -> Items | None:
    """The items of a file in one of the other forms as nested objects, or None.

    They have `children`, `text`, `value` and, of KV events, `tokens`.
    """
    first = items[0][1]
    if isinstance(first, dict) and {"completions", "scores"} <= first.keys():
        return [(place, _made(_completions, item)) for place, item in items]
    if isinstance(first, dict) and {"eval", "samples"} <= first.keys():
        return [
            (
                f"sample {i}",
                _trie([[(said, None) for said in (*call.prompt, call.answer)] for call in sample]),
            )
            for i, sample in enumerate(samples_of(first))
        ]
    if any(_events(item) for _, item in items[:100]):
        return [(f"tree {i}", tree) for i, tree in enumerate(_prefixes(items))]
    return None


def _made(make: Any, item: Any) -> Any:
    """A nested object, or the `Damage` that `NestedTree` will report."""
    try:
        return make(item)
    except Damage as error:
        return error


def _completions(item: Any) -> dict[str, Any]:
    """A problem of search-and-learn's: completions are cut at empty lines, as they were scored."""
    scores = array(field(item, "scores"), "scores")
    paths = []
    for i, said in enumerate(array(field(item, "completions"), "completions")):
        values = scores[i] if i < len(scores) and isinstance(scores[i], list) else []
        steps = text(said, f"completion {i}").split("\n\n")
        if len(steps) > len(values) > 0:  # an answer behind the last scored step belongs to it
            steps[len(values) - 1 :] = ["\n\n".join(steps[len(values) - 1 :])]
        paths.append(
            [(step, values[k] if k < len(values) else None) for k, step in enumerate(steps)]
        )
    found = _trie(paths)
    return {
        **found,
        "text": text(field(item, "problem"), "problem"),
        "children": ([found] if found["text"] else found["children"]),
    }


def _trie(paths: Sequence[Sequence[tuple[str, Any]]]) -> dict[str, Any]:
    """Texts one after the other as a tree, whose root is what all paths begin with."""
    root: dict[str, Any] = {"text": "", "value": None, "children": []}
    below: dict[int, dict[str, Any]] = {id(root): {}}
    for path in paths:
        at = root
        for said, value in path:
            known = below[id(at)]
            if said not in known:
                known[said] = {"text": said, "value": value, "children": []}
                below[id(known[said])] = {}
                at["children"].append(known[said])
            at = known[said]
    shared, at = [], root
    ends = {id(at) for at in _ends(root, paths)}
    while len(at["children"]) == 1 and id(at["children"][0]) not in ends:
        at = at["children"][0]
        shared.append(at["text"])
    return {**at, "text": "".join(shared)}


def _ends(root: dict[str, Any], paths: Sequence[Sequence[tuple[str, Any]]]) -> Iterator[Any]:
    """The last node of each path, which is an answer."""
    for path in paths:
        at = root
        for said, _ in path:
            at = next(child for child in at["children"] if child["text"] == said)
        yield at


def _events(item: Any) -> list[dict[str, Any]]:
    """The blocks stored in a line: a batch of events or one of them, as objects or as arrays."""
    if isinstance(item, dict) and "events" in item:
        item = item["events"]
    elif isinstance(item, list) and len(item) > 1 and isinstance(item[1], list):
        item = item[1]  # a batch as an array: its time, its events
    found = []
    for event in item if isinstance(item, list) else [item]:
        if isinstance(event, list) and event and event[0] == "BlockStored":
            keys = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size")
            event = dict(zip(keys, event, strict=False))
        if isinstance(event, dict) and event.get("type") == "BlockStored":
            found.append(event)
    return found


def _prefixes(items: Items) -> list[dict[str, Any]]:
    """Trees of the blocks that were stored; those that only follow each other are one node."""
    nodes: dict[Any, dict[str, Any]] = {}
    roots: list[dict[str, Any]] = []
    for place, item in items:
        for event in _events(item):
            above = nodes.get(event.get("parent_block_hash"))  # or stored before the log begins
            size = whole(field(event, "block_size"), f"{place}: block_size", low=1)
            for name in array(field(event, "block_hashes"), f"{place}: block_hashes"):
                if not isinstance(name, int | str):
                    raise Damage(f"{place}: a hash is {name!r:.40}")
                if name not in nodes:
                    nodes[name] = {"tokens": size, "children": []}
                    (roots if above is None else above["children"]).append(nodes[name])
                above = nodes[name]
    for node in nodes.values():
        while len(node["children"]) == 1:
            only = node["children"][0]
            node["tokens"] += only["tokens"]
            node["children"] = only["children"]
    return roots
