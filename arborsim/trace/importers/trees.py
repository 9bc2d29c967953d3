"""Logs of tree searches: those of the tree-of-thoughts program, and DeFT's reasoning trees.

*Tree of thoughts* (breadth first), such as GPT-4's log of the Game of 24: Yao et al. (2023, "Tree
of Thoughts"), whose program writes a JSON list of problems.  A problem has `steps`; a step has the
states `ys` it began with, all proposals `new_ys` (each a state and what was added to it), their
`values`, and the selection `select_new_ys`; `infos` holds the verdict `r` on each of the final
`ys`.

*DeFT*: Yao et al. (2025, "DeFT: Decoding with Flash Tree-attention"), whose data is a JSON list
of trees ``{"incompleted", "prompt", "data": {id: {"id", "value", "start", "end", "children"}}}``:
`value` is a node's number of tokens, `start` and `end` its first and last position counted from
the end of the prompt, and node 0 the prompt.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from arborsim.trace.importers.sources import (
    Damage,
    FinalAnswer,
    Thought,
    ThoughtBatch,
    WrittenSearch,
    array,
    field,
    finite,
    text,
    whole,
)
from arborsim.trace.schema import End


@dataclass(frozen=True)
class TotLog:
    """How a log becomes searches."""

    #: The log has text, but no tokens.  In GPT-4's Game of 24 log there are 138,989 pieces of about
    #: cl100k's splitting pattern (a token or more each) in 225,183 characters
    tokens_per_character: float = 0.62
    #: Length of the prompt, of which the log has only the problem; 0: the problem's length
    prompt_tokens: int = 0
    #: The value that becomes reward 1: three votes of at most 20 ("sure"), as the program's value
    #: prompt scores them
    value_scale: float = 60.0

    def tokens(self, written: str) -> int:
        """Tokens of a text; at least one."""
        return max(1, round(len(written) * self.tokens_per_character))

    def search_of(self, item: Any) -> WrittenSearch:
        """One problem: each step is a batch of proposals, after which the unselected are given up.

        The answer is right if any of the final states is (for b = 5: any of 5); its leaf is the
        first right one, or the first.  The verdict on each state stands at its block as well.  All
        proposals of the last step are finished; one whose last line is ``Answer: ...`` answers it.

        It is a `Damage` if steps do not follow from each other, a proposal continues no state, a
        selection was not proposed, or a field is of the wrong type.
        """
        steps = array(field(item, "steps"), "steps")
        if not steps:
            raise Damage("there are no steps")
        problem = text(field(steps[0], "x"), "step 0: x")
        states = [("", 0)]
        count, batches = 1, []
        for index, step in enumerate(steps):
            at = f"step {index}"
            if field(step, "x") != problem:
                raise Damage(f"{at}: x differs from that of step 0")
            if _texts(step, "ys", at) != [state for state, _ in states]:
                raise Damage(f"{at}: ys are not what the step before selected")
            thoughts, proposals = self._thoughts(step, states, at)
            states = _selected(_texts(step, "select_new_ys", at), proposals, count, at)
            kept = {node for _, node in states}
            pruned = [node for node in range(count, count + len(thoughts)) if node not in kept]
            count += len(thoughts)
            batches.append(ThoughtBatch(thoughts, pruned))
        finished = [
            replace(thought, end=End.FINISHED, answer=_answer(state))
            for thought, state in zip(thoughts, proposals, strict=True)
        ]
        batches[-1] = ThoughtBatch(finished, pruned)
        answer = _judge(item, states, batches, count)
        prompt_tokens = self.prompt_tokens or self.tokens(problem)
        return WrittenSearch(prompt_tokens, batches, problem, answer)

    def _thoughts(
        self, step: Any, states: list[tuple[str, int]], at: str
    ) -> tuple[list[Thought], list[str]]:
        proposals = _texts(step, "new_ys", at)
        values = array(field(step, "values"), f"{at}: values")
        if len(values) != len(proposals):
            raise Damage(f"{at}: {len(values)} values for {len(proposals)} proposals")
        thoughts = []
        for i, (proposal, value) in enumerate(zip(proposals, values, strict=True)):
            above = [state for state in states if proposal.startswith(state[0])]
            if not above:
                raise Damage(f"{at}: proposal {i} continues none of the step's ys")
            state, node = max(above, key=lambda state: len(state[0]))  # the first of equal ones
            reward = finite(value, f"{at}: value {i}", low=0.0) / self.value_scale
            if reward > 1:
                raise Damage(f"{at}: value {i} is {value}, more than {self.value_scale:g}")
            added = proposal[len(state) :]
            thoughts.append(Thought(node, self.tokens(added), reward, added))
        return thoughts, proposals


def _texts(step: Any, name: str, at: str) -> list[str]:
    return [text(value, f"{at}: {name}") for value in array(field(step, name), f"{at}: {name}")]


def _selected(
    selection: list[str], proposals: list[str], first: int, at: str
) -> list[tuple[str, int]]:
    """The selected states and their nodes; equal proposals are taken in order."""
    nodes: dict[str, deque[int]] = {}
    for node, proposal in enumerate(proposals, first):
        nodes.setdefault(proposal, deque()).append(node)
    states = []
    for i, state in enumerate(selection):
        if not nodes.get(state):
            raise Damage(f"{at}: selection {i} was not proposed")
        states.append((state, nodes[state].popleft()))
    return states


def _answer(state: str) -> str | None:
    """What a state answers, if its last line does."""
    line = state.strip().rpartition("\n")[2]
    label, colon, said = line.partition(":")
    return said.strip() if colon and label.strip().lower() == "answer" else None


def _judge(
    item: Any, states: list[tuple[str, int]], batches: list[ThoughtBatch], count: int
) -> FinalAnswer | None:
    """The answer; the verdicts on final states go to their thoughts, too."""
    if _texts(item, "ys", "the end") != [state for state, _ in states]:
        raise Damage("the final ys are not what the last step selected")
    infos = array(field(item, "infos"), "infos")
    if len(infos) != len(states):
        raise Damage(f"{len(infos)} verdicts for {len(states)} final ys")
    verdicts = [whole(field(info, "r"), f"verdict {i}", high=1) for i, info in enumerate(infos)]
    if not states:
        return None
    last = list(batches[-1].thoughts)
    first = count - len(last)
    for (_, node), verdict in zip(states, verdicts, strict=True):
        old = last[node - first]
        last[node - first] = replace(old, correct=verdict)
    batches[-1] = ThoughtBatch(last, batches[-1].pruned)
    best = verdicts.index(max(verdicts))
    return FinalAnswer(states[best][1], max(verdicts), states[best][0])


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
    return WrittenSearch(tokens["0"], _levels(data, children, tokens), prompt)


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


def _levels(
    data: dict[str, Any], children: dict[str, list[str]], tokens: dict[str, int]
) -> list[ThoughtBatch]:
    number = {"0": 0}
    if data["0"]["end"] != 0:
        raise Damage(f"the prompt ends at {data['0']['end']} instead of 0")
    level, batches = ["0"], []
    while pairs := [(up, name) for up in level for name in children[up]]:
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
        batches.append(
            ThoughtBatch([Thought(number[up], tokens[name]) for up, name in pairs], pruned)
        )
    lost = [name for name in data if name not in number]
    if lost:
        raise Damage(f"node {lost[0]} is no descendant of node 0")
    return batches
