"""Logs of the tree-of-thoughts code (breadth first), such as GPT-4's on the Game of 24.

Source: Yao et al. (2023, "Tree of Thoughts"), whose program writes a JSON list of problems.  A
problem has `steps`; a step has the states `ys` it began with, all proposals `new_ys` (each a state
and what was added to it), their `values`, and the selection `select_new_ys`; `infos` holds the
verdict `r` on each of the final `ys`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from arborsim.trace.importers.damage import Damage, array, field, finite, text, whole
from arborsim.trace.importers.thoughts import Answer, Batch, Search, Thought
from arborsim.trace.schema import End

#: Three votes of at most 20 ("sure"), as the program's value prompt scores them.
VALUE_SCALE = 60.0

#: Pieces of about cl100k's splitting pattern (a token or more each) per character in GPT-4's Game
#: of 24 log: 138,989 / 225,183.
TOKENS_PER_CHARACTER = 0.62


@dataclass(frozen=True)
class TotLog:
    """How a log becomes searches.

    Attributes
    ----------
    tokens_per_character : float
        The log has text, but no tokens.
    prompt_tokens : int
        Length of the prompt, of which the log has only the problem; 0: the problem's length.
    value_scale : float
        The value that becomes reward 1.
    """

    tokens_per_character: float = TOKENS_PER_CHARACTER
    prompt_tokens: int = 0
    value_scale: float = VALUE_SCALE

    def tokens(self, written: str) -> int:
        """Tokens of a text; at least one."""
        return max(1, round(len(written) * self.tokens_per_character))

    def search_of(self, item: Any) -> Search:
        """One problem: each step is a batch of proposals, after which the unselected are given up.

        The answer is right if any of the final states is (for b = 5: any of 5); its leaf is the
        first right one, or the first.  The verdict on each state stands at its block as well.  All
        proposals of the last step are finished; one whose last line is ``Answer: ...`` answers it.

        Raises
        ------
        Damage
            Steps do not follow from each other, a proposal continues no state, a selection was not
            proposed, or a field is of the wrong type.
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
            batches.append(Batch(thoughts, pruned))
        batches[-1] = _finish(batches[-1], proposals)
        answer = _judge(item, states, batches, count)
        prompt_tokens = self.prompt_tokens or self.tokens(problem)
        return Search(prompt_tokens, batches, problem, answer)

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


def _finish(last: Batch, proposals: list[str]) -> Batch:
    """The last step's thoughts, each with its answer if its state ends in one."""
    finished = [
        replace(thought, end=End.FINISHED, answer=_answer(state))
        for thought, state in zip(last.thoughts, proposals, strict=True)
    ]
    return Batch(finished, last.pruned)


def _answer(state: str) -> str | None:
    line = state.strip().rpartition("\n")[2]
    label, colon, said = line.partition(":")
    return said.strip() if colon and label.strip().lower() == "answer" else None


def _judge(
    item: Any, states: list[tuple[str, int]], batches: list[Batch], count: int
) -> Answer | None:
    """The answer; the verdicts on final states are put beside their thoughts."""
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
    batches[-1] = Batch(last, batches[-1].pruned)
    best = verdicts.index(max(verdicts))
    return Answer(states[best][1], max(verdicts), states[best][0])
