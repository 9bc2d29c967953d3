"""DeFT's reasoning trees: a JSON list of trees with token counts per node.

Source: data of DeFT (Yao et al., 2025, "DeFT: Decoding with Flash Tree-attention"); a tree is
``{"incompleted", "prompt", "data": {id: {"id", "value", "start", "end", "children"}}}``, where
`value` is a node's number of tokens, `start` and `end` its first and last position counted from the
end of the prompt, and node 0 the prompt.
"""

from __future__ import annotations

from typing import Any

from arborsim.trace.importers.damage import Damage, array, field, text, whole
from arborsim.trace.importers.thoughts import Batch, Search, Thought


def search_of(item: Any) -> Search:
    """A tree as a level-synchronous search: all nodes of a level are written side by side.

    Nodes without children are given up once their level is complete, unless it is the last one:
    the search went on elsewhere and never came back.

    Raises
    ------
    Damage
        The tree is incomplete, names nodes that do not exist, or its positions contradict its
        lengths.
    """
    data = field(item, "data")
    if not isinstance(data, dict):
        raise Damage("data is not an object of nodes")
    if field(item, "incompleted") is not False:
        raise Damage(f"the tree is marked incomplete and has {len(data)} nodes")
    prompt = text(item["prompt"], "prompt") if item.get("prompt") is not None else None
    if "0" not in data:
        raise Damage("the tree has no node 0, the prompt")
    children = {name: _children(name, node, data) for name, node in data.items()}
    tokens = {name: _tokens(name, node) for name, node in data.items()}
    return Search(tokens["0"], _levels(data, children, tokens), prompt)


def _children(name: str, node: Any, data: dict[str, Any]) -> list[str]:
    if str(whole(field(node, "id"), f"node {name:.20}: id")) != name:
        raise Damage(f"node {name:.20} has id {node['id']}")
    found = []
    for child in array(field(node, "children"), f"node {name}: children"):
        number = str(whole(child, f"node {name}: a child"))
        if number not in data:
            raise Damage(f"node {name} names child {number}, which does not exist")
        found.append(number)
    return found


def _tokens(name: str, node: Any) -> int:
    tokens = whole(field(node, "value"), f"node {name}: value", low=1)
    start, end = (
        whole(field(node, key), f"node {name}: {key}", low=-(1 << 31)) for key in ("start", "end")
    )
    if end - start + 1 != tokens:
        raise Damage(f"node {name} has {tokens} tokens, but goes from {start} to {end}")
    return tokens


def _levels(
    data: dict[str, Any], children: dict[str, list[str]], tokens: dict[str, int]
) -> list[Batch]:
    number = {"0": 0}
    if data["0"]["end"] != 0:
        raise Damage(f"the prompt ends at {data['0']['end']} instead of 0")
    level, batches = ["0"], []
    while True:
        pairs = [(up, name) for up in level for name in children[up]]
        if not pairs:
            break
        for up, name in pairs:
            if name in number:
                raise Damage(f"node {name} is reached twice: this is no tree")
            number[name] = len(number)
            if data[name]["start"] != data[up]["end"] + 1:
                raise Damage(
                    f"node {name} starts at {data[name]['start']}, but node {up} above it ends at "
                    f"{data[up]['end']}"
                )
        level = [name for _, name in pairs]
        ended = [name for name in level if not children[name]]
        pruned = [number[name] for name in ended] if len(ended) < len(level) else []
        batches.append(Batch([Thought(number[up], tokens[name]) for up, name in pairs], pruned))
    lost = [name for name in data if name not in number]
    if lost:
        raise Damage(f"node {lost[0]} is no descendant of node 0")
    return batches
