"""Trees of thoughts without a record of their search: DeFT's, and any tree of nested objects.

*DeFT*: Yao et al. (2025, "DeFT: Decoding with Flash Tree-attention"), whose data is a JSON list
of trees ``{"incompleted", "prompt", "data": {id: {"id", "value", "start", "end", "children"}}}``:
`value` is a node's number of tokens, `start` and `end` its first and last position counted from
the end of the prompt, and node 0 the prompt.

*Nested*: an object has its children in a list or an object, and so have these (`NestedTree`).
OpenR's OmegaPRM trees are such: ``{"question", "reasoning_steps": {"text", "mc_value", "children":
[...]}}``.  `tree_forms` makes such objects of trees in other forms.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from arborsim.core.errors import UsageError
from arborsim.trace.importers.fields import (
    Damage,
    array,
    field,
    finite,
    kind_of,
    reward,
    text,
    whole,
)
from arborsim.trace.importers.searches import (
    Lengths,
    Thought,
    ThoughtBatch,
    WrittenSearch,
    one_by_one,
)
from arborsim.trace.importers.sources import Contents, contents, listed, objects_of
from arborsim.trace.importers.tree_forms import flat, names_of, recognised


def deft_search(item: Any) -> WrittenSearch:
    """A tree as a level-synchronous search: all nodes of a level are written side by side.

    Nodes without children are given up once their level is complete, unless it is the last one:
    the search went on elsewhere and never came back.

    It is a `Damage` if the tree is incomplete, names nodes that do not exist, or its positions
    contradict its lengths.
    """
    data = field(item, "data")
    if not isinstance(data, dict):
        raise Damage("data is not an object of nodes")
    if field(item, "incompleted") is not False:
        raise Damage(f"the tree is marked incomplete and has {len(data)} nodes")
    prompt = text(item["prompt"], "prompt") if item.get("prompt") is not None else None
    if "0" not in data:
        raise Damage("the tree has no node 0, the prompt")
    children = {name: _node_children(name, node, data) for name, node in data.items()}
    tokens = {name: _node_tokens(name, node) for name, node in data.items()}
    thoughts = _deft_thoughts(data, children, tokens)
    return WrittenSearch(tokens["0"], by_levels(thoughts), prompt)


def _node_children(name: str, node: Any, data: dict[str, Any]) -> list[str]:
    if str(whole(field(node, "id"), f"node {name:.20}: id")) != name:
        raise Damage(f"node {name:.20} has id {node['id']}")
    found = []
    for child in array(field(node, "children"), f"node {name}: children"):
        number = str(whole(child, f"node {name}: a child"))
        if number not in data:
            raise Damage(f"node {name} names child {number}, which does not exist")
        found.append(number)
    return found


def _node_tokens(name: str, node: Any) -> int:
    tokens = whole(field(node, "value"), f"node {name}: value", low=1)
    start, end = (
        whole(field(node, key), f"node {name}: {key}", low=-(1 << 31)) for key in ("start", "end")
    )
    if end - start + 1 != tokens:
        raise Damage(f"node {name} has {tokens} tokens, but goes from {start} to {end}")
    return tokens


def _deft_thoughts(
    data: dict[str, Any], children: dict[str, list[str]], tokens: dict[str, int]
) -> list[Thought]:
    """Level by level."""
    number = {"0": 0}
    if data["0"]["end"] != 0:
        raise Damage(f"the prompt ends at {data['0']['end']} instead of 0")
    order, thoughts = ["0"], []
    for up in order:  # grows
        for name in children[up]:
            if name in number:
                raise Damage(f"node {name} is reached twice: this is no tree")
            if data[name]["start"] != data[up]["end"] + 1:
                raise Damage(
                    f"node {name} starts at {data[name]['start']}, but node {up} above it ends at "
                    f"{data[up]['end']}"
                )
            number[name] = len(number)
            order.append(name)
            thoughts.append(Thought(number[up], tokens[name]))
    lost = [name for name in data if name not in number]
    if lost:
        raise Damage(f"node {lost[0]} is no descendant of node 0")
    return thoughts


def by_levels(thoughts: Sequence[Thought]) -> list[ThoughtBatch]:
    """Thoughts as a level-synchronous search: those of a level are written side by side.

    They come level by level.  Those without children are given up once their level is complete,
    unless it is the last one: the search went on elsewhere and never came back.
    """
    depth, levels = [0], [[0]]
    for number, thought in enumerate(thoughts, 1):
        depth.append(depth[thought.parent] + 1)
        if depth[number] == len(levels):
            levels.append([])
        levels[depth[number]].append(number)
    above = {thought.parent for thought in thoughts}
    return [
        ThoughtBatch(
            [thoughts[number - 1] for number in level],
            [number for number in level if number not in above] if level is not levels[-1] else [],
        )
        for level in levels[1:]
    ]


@dataclass(frozen=True)
class NestedTree(Lengths):
    """Where a nested tree has what: names of fields, with dots where objects lie in objects."""

    children: str = "children"
    text: str = "text"  # "" for none
    value: str = ""  # what becomes the reward; "" for none
    tokens: str = ""  # numbers of tokens; "" for those of the texts
    root: str = ""  # of an item, where the prompt's node is; "" for the item itself
    #: The value that becomes reward 1; 0: values are rewards, or if some are none, from the least
    #: value (0) to the largest (1)
    value_scale: float = 0.0
    node_id: str = ""  # of flat nodes, the names of the fields that ``tree_forms`` knows; "": usual
    parent: str = ""
    #: Thoughts one after the other, children in their order, as a depth-first search would write
    #: them; else level by level
    depth_first: bool = False

    def read(self, path: Path, limit: int = 0) -> tuple[Contents[WrittenSearch], str]:
        """The trees of a file in any form, and what is to be said of their values.

        Raises `UsageError` if the file cannot be read, or nothing in it has children or a parent.
        """
        items = objects_of(path)
        reading, made = self, recognised(items) if items else None
        if made is not None:
            tokens = "tokens" if made and "tokens" in _as_dict(made[0][1]) else ""
            reading = replace(
                self,
                children="children",
                text="" if tokens else "text",
                value="" if tokens else "value",
                tokens=tokens,
                root="",
            )
        elif items and (names := names_of(items[0][1], self.node_id, self.parent, self.children)):
            try:
                roots = flat([item for _, item in items], names, self.children)
            except Damage as error:
                raise UsageError(f"{path}: {error}") from None
            made = list(listed(roots))
        found = contents(
            path, (made if made is not None else items)[: limit or None], reading.search_of
        )
        alone = not any(search.batches for search in found.searches)
        if found.searches and alone and not _names(items, self.children):
            raise UsageError(
                f"{path}: nothing in it has the field {self.children!r:.40}: name that of children "
                "with --children, or of parents with --parent (and --node-id)"
            )
        return (found, "") if self.value_scale else _within_one(found)

    def search_of(self, item: Any) -> WrittenSearch:
        """One tree.  The source does not say in what order it grew: that is the reader's choice.

        It is a `Damage` if a node has no text (or number of tokens), or a field is of a wrong type.
        """
        if isinstance(item, Damage):
            raise item
        root = _at(item, self.root, "the tree") if self.root else item
        if isinstance(root, list) and root:
            names = names_of(root[0], self.node_id, self.parent, self.children)
            roots = flat(root, names, self.children) if names else []
            if len(roots) == 1:
                root = roots[0]
        if not isinstance(root, dict):
            raise Damage(f"the root is {kind_of(root)} instead of an object")
        prompt = self._text(root, "the root")
        length = self.prompt_tokens or (
            self._tokens(root, "the root") if self.tokens else self.prompt(prompt)
        )
        thoughts = self._thoughts(root)
        batches = one_by_one(thoughts) if self.depth_first else by_levels(thoughts)
        return WrittenSearch(length, batches, prompt)

    def _thoughts(self, root: dict[str, Any]) -> list[Thought]:
        """Those below the root, in the order of the search, named by places in lists."""
        found: list[Thought] = []
        waiting = deque([(root, "", -1)])
        while waiting:
            node, name, parent = waiting.pop() if self.depth_first else waiting.popleft()
            if name:
                found.append(self._thought(node, f"node {name:.60}", parent))
            number = len(found)
            below = [
                (child, f"{name}.{i}" if name else f"{i}", number)
                for i, child in enumerate(self._children(node, name))
            ]
            waiting.extend(reversed(below) if self.depth_first else below)
        return found

    def _children(self, node: Any, name: str) -> list[Any]:
        """Those of a node, none if it does not name any, or null."""
        at = f"node {name:.60}" if name else "the root"
        below = _at(node, self.children, at, missing=True)
        if isinstance(below, dict):
            return list(below.values())
        return [] if below is None else array(below, f"{at}: {self.children}")

    def _thought(self, node: Any, at: str, parent: int) -> Thought:
        written = self._text(node, at)
        length = self._tokens(node, at) if self.tokens else self.thought(written or "")
        value = _at(node, self.value, at, missing=True) if self.value else None
        what = f"{at}: {self.value}"
        if value is None:
            worth = math.nan
        elif self.value_scale:
            worth = reward(value, what, self.value_scale)
        else:
            worth = finite(value, what)
        return Thought(parent, length, worth, written)

    def _text(self, node: Any, at: str) -> str | None:
        return text(_at(node, self.text, at), f"{at}: {self.text}") if self.text else None

    def _tokens(self, node: Any, at: str) -> int:
        return whole(_at(node, self.tokens, at), f"{at}: {self.tokens}", low=1)


def _names(value: Any, path: str) -> bool:
    """Whether any object in it has this field."""
    waiting, name = [value], path.split(".")[0]
    for each in waiting:  # grows
        if isinstance(each, dict):
            if name in each:
                return True
            waiting.extend(each.values())
        elif isinstance(each, list | tuple):
            waiting.extend(each)
    return False


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _within_one(found: Contents[WrittenSearch]) -> tuple[Contents[WrittenSearch], str]:
    """Searches whose values are rewards, and what was done if they were none."""
    values = [
        thought.reward
        for search in found.searches
        for batch in search.batches
        for thought in batch.thoughts
        if not math.isnan(thought.reward)
    ]
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low >= 0 and high <= 1:
        return found, ""
    span = high - low or 1.0
    moved = tuple(
        replace(
            search,
            batches=[
                replace(
                    batch,
                    thoughts=[
                        replace(each, reward=(each.reward - low) / span) for each in batch.thoughts
                    ],
                )
                for batch in search.batches
            ],
        )
        for search in found.searches
    )
    return replace(
        found, searches=moved
    ), f"values from {low:g} to {high:g} are rewards from 0 to 1"


def _at(node: Any, path: str, where: str, missing: bool = False) -> Any:
    """The value at a path of names with dots, or None if it may be `missing` and is."""
    for name in path.split("."):
        if not isinstance(node, dict):
            raise Damage(f"{where}: expected an object with {name}, found {kind_of(node)}")
        if name not in node:
            if missing:
                return None
            raise Damage(f"{where}: {name} is missing")
        node = node[name]
    return node
