"""Files of searches that ran elsewhere: JSON lines, each a chain or a tree of thoughts.

What needs no tokeniser and no vocabulary is checked without PyTorch (`read_searches`), and every
error names the file, the line and the node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from arborsim.core.errors import UsageError
from arborsim.play.given import PROMPT, GivenTree, TreeBuilder
from arborsim.play.problem_sets import read_lines

GIVEN = '{"prompt": ..., "tokens": ...} or {"prompt": ..., "nodes": [...]}'
_ANY = 1 << 31
_TEXT_OR_IDS = "text, or a list of token ids"


@dataclass(frozen=True)
class Words:
    """Facts of text and tokens that come with the model: none by default."""

    encode: Callable[[str, bool], list[int]] = lambda text, is_prompt: [0]
    #: where the thoughts of a chain end: numbers of tokens, the last one all of them
    cut: Callable[[Sequence[int], Sequence[int]], Sequence[int]] = lambda prompt, own: [len(own)]
    vocabulary: int = _ANY
    longest: int = _ANY


def read_searches(path: Path) -> list[GivenSearch]:
    """The searches of a file, checked as far as no model is needed.

    Raises `UsageError`, which names the file, the line and what is wrong.
    """
    found = [
        GivenSearch(f"{path}, line {number}", entry) for number, entry in read_lines(path, GIVEN)
    ]
    for search in found:
        search.tree(Words())
    return found


@dataclass(frozen=True)
class GivenSearch:
    """One line of a file."""

    where: str
    entry: Mapping[str, Any]

    @property
    def chain(self) -> bool:
        """Whether thoughts follow one another without a branch."""
        return "nodes" not in self.entry and "children" not in self.entry

    def tree(self, words: Words) -> GivenTree:
        """The tree of the line; raises `UsageError`."""
        builder = TreeBuilder(words.vocabulary, words.longest)
        try:
            if self.chain:
                self._add_chain(builder, words)
            else:
                self._add_tree(builder, words)
            return builder.tree()
        except UsageError as error:
            raise UsageError(f"{self.where}: {error}") from error

    def _add_chain(self, builder: TreeBuilder, words: Words) -> None:
        prompt, tokens = (_ids(self.entry, key, words, key == "prompt") for key in _CHAIN)
        ends = _ends(self.entry, len(tokens)) or words.cut(prompt, tokens)
        builder.prompt(prompt)
        above = PROMPT
        builder.ids(tokens, '"tokens"')  # before thoughts of it are named
        for first, end in pairwise([0, *ends]):
            above = builder.add(above, tokens[first:end])
        builder.answer(above, _verdict(self.entry))

    def _add_tree(self, builder: TreeBuilder, words: Words) -> None:
        nodes, root = _nodes_of(self.entry)
        if root is None:
            builder.prompt(_ids(self.entry, "prompt", words, True))
        else:
            builder.prompt(_ids(root.entry, root.key, words, True))
        number = {"": PROMPT}
        for node in nodes:
            try:
                number[node.id] = self._add(builder, number[node.parent], node, words)
            except UsageError as error:
                said = str(error)
                raise UsageError(said if said.startswith("node ") else f"{node}: {said}") from error
        for node in sorted(nodes, key=lambda node: -builder.nodes[number[node.id]].depth):
            after = node.pruned
            if after is not None:
                at = number[node.id]
                builder.prune(at, builder.nodes[at].last if after is True else after)
        self._choose(builder, nodes, number)

    def _add(self, builder: TreeBuilder, parent: int, node: _Node, words: Words) -> int:
        entry = node.entry
        reward, text, answer = (entry.get(key) for key in ("reward", "text", "answer"))
        if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
            raise UsageError("reward is no number")
        if not isinstance(text, str | None) or not isinstance(answer, str | None):
            raise UsageError("text and answer are texts, or left out")
        known: dict[str, Any] = {
            "reward": reward,
            "text": text,
            "answer": answer,
            "correct": _verdict(entry),
        }
        ids = _ids(entry, node.key, words, False)
        return builder.add(parent, ids, name=str(node), step=node.order, **known)

    def _choose(
        self, builder: TreeBuilder, nodes: Sequence[_Node], number: Mapping[str, int]
    ) -> None:
        """The node that the search handed in: the chosen one, or the only one that answers."""
        chosen = self.entry.get("chosen")
        finished = [node.id for node in nodes if builder.nodes[number[node.id]].finished]
        if chosen is None and len(finished) == 1:
            (chosen,) = finished
        if chosen is None:
            return
        if str(chosen) not in number or str(chosen) == "":
            raise UsageError(f'"chosen" is {chosen!r}, which is no node')
        builder.answer(number[str(chosen)], _verdict(self.entry))


_CHAIN = ("prompt", "tokens")


@dataclass(frozen=True)
class _Node:
    """A node as it is written."""

    id: str
    parent: str  #: "" for the prompt
    entry: Mapping[str, Any]

    def __str__(self) -> str:
        return f"node {self.id:.40}"

    @property
    def key(self) -> str:
        """Where its tokens stand."""
        return "tokens" if "tokens" in self.entry or "text" not in self.entry else "text"

    @property
    def order(self) -> int | None:
        order = self.entry.get("order")
        if order is not None and not _is_whole(order):
            raise UsageError(f"{self}: order is no whole number")
        return order

    @property
    def pruned(self) -> Any:
        """The order after which it was given up, or true; None if it was not."""
        pruned = self.entry.get("pruned")
        if pruned is None or pruned is False:
            return None
        if pruned is not True and not _is_whole(pruned):
            raise UsageError(f"{self}: pruned is true, false, or the order after which it was")
        return pruned


def _nodes_of(entry: Mapping[str, Any]) -> tuple[list[_Node], _Node | None]:
    """The nodes of a line, each after the one above it, and the one that is the prompt, if any."""
    if "nodes" in entry and "children" in entry:
        raise UsageError('give "nodes" or "children", not both')
    found = list(_listed(entry["nodes"]) if "nodes" in entry else _nested(entry))
    if not found:
        raise UsageError("the search has no nodes")
    known = {node.id: node for node in found}
    if len(known) < len(found):
        twice = next(a for i, a in enumerate(found) if known[a.id] is not found[i])
        raise UsageError(f"two nodes have the id {twice.id:.40}")
    root = None
    if "prompt" not in entry and "children" in entry:
        root = _Node("", "", entry)
    elif "prompt" not in entry:
        roots = [node for node in found if not node.parent]
        if len(roots) != 1:
            named = " and ".join(str(node) for node in roots[:2]) or "no node"
            raise UsageError(
                f'{named} without a parent: give the prompt as "prompt", or one such node as it'
            )
        (root,) = roots
        inner = (node for node in found if node is not root)
        found = [replace(n, parent="" if n.parent == root.id else n.parent) for n in inner]
    return _in_order(found), root


def _listed(nodes: Any) -> Iterator[_Node]:
    if not isinstance(nodes, list):
        raise UsageError('"nodes" is no list')
    for place, node in enumerate(nodes):
        if not isinstance(node, Mapping) or node.get("id", "") == "":
            raise UsageError(f"nodes[{place}] is no object with an id")
        parent = node.get("parent")
        yield _Node(str(node["id"]), "" if parent is None else str(parent), node)


def _nested(entry: Mapping[str, Any]) -> Iterator[_Node]:
    """Level by level; a node without an id is named by its place."""
    waiting: deque[tuple[str, str, Any]] = deque([("", "", entry)])
    while waiting:
        name, parent, node = waiting.popleft()
        if not isinstance(node, Mapping):
            raise UsageError(f"node {name} is no object")
        own = str(node.get("id", name)) if name else ""
        if name:
            yield _Node(own, parent, node)
        below = node.get("children", [])
        if not isinstance(below, list):
            raise UsageError(f"{f'node {own}' if own else 'the search'}: children is no list")
        places = (f"{name}.{i}" if name else f"{i}" for i in range(len(below)))
        waiting.extend((place, own, each) for place, each in zip(places, below, strict=True))


def _in_order(nodes: Sequence[_Node]) -> list[_Node]:
    """Each node after the one above it: in the file's order if it says none and that will do."""
    depth = {"": 0}
    left = list(nodes)
    while left:
        rest = []
        for node in left:
            if node.parent in depth:
                depth[node.id] = depth[node.parent] + 1
            else:
                rest.append(node)
        if len(rest) == len(left):
            _refuse_loop(rest)
        left = rest
    place = {node.id: i for i, node in enumerate(nodes)}
    ordered = [node.order is not None for node in nodes]
    if any(ordered) and not all(ordered):
        without = nodes[ordered.index(False)]
        raise UsageError(f"{without} has no order, although others have")
    backwards = any(place.get(node.parent, -1) > place[node.id] for node in nodes)
    return sorted(nodes, key=lambda node: depth[node.id]) if ordered[0] or backwards else [*nodes]


def _refuse_loop(nodes: Sequence[_Node]) -> None:
    """Say why none of these hangs on the prompt."""
    known = {node.id: node for node in nodes}
    for node in nodes:
        if node.parent not in known:
            raise UsageError(f"{node} names parent {node.parent:.40}, which does not exist")
    seen, at = list[str](), nodes[0]
    while at.id not in seen:
        seen.append(at.id)
        at = known[at.parent]
    circle = [*seen[seen.index(at.id) :], at.id]
    raise UsageError(f"node {' follows '.join(circle[:6])}: this is no tree")


def _ids(entry: Mapping[str, Any], key: str, words: Words, is_prompt: bool) -> list[int]:
    given = entry.get(key)
    if isinstance(given, str) and given:
        return words.encode(given, is_prompt)
    if not isinstance(given, list) or not given or not all(map(_is_whole, given)):
        raise UsageError(f'expected "{key}": {_TEXT_OR_IDS}')
    return given


def _ends(entry: Mapping[str, Any], count: int) -> list[int]:
    """Where the thoughts of a chain of `count` tokens end; none if the line does not say."""
    ends = entry.get("thoughts")
    if ends is None:
        return []
    if isinstance(entry["tokens"], str):
        raise UsageError('"thoughts" counts tokens: give "tokens" as ids')
    whole = isinstance(ends, list) and all(map(_is_whole, ends)) and ends[-1:] == [count]
    if not whole or any(a >= b for a, b in pairwise([0, *ends])):
        raise UsageError(
            f'"thoughts" lists after how many tokens each thought ends, in order, the last one '
            f"{count}"
        )
    return list(ends)


def _verdict(entry: Mapping[str, Any]) -> bool | None:
    correct = entry.get("correct")
    if correct is not None and not isinstance(correct, bool):
        raise UsageError('"correct" is true, false or left out')
    return correct


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
