"""Logs of the tree-of-thoughts program (Yao et al., 2023, "Tree of Thoughts"), in its three forms.

The program writes a JSON list with an entry per problem:

*Breadth first* (`search_of` calls it by its `steps`), such as GPT-4's Game of 24 and its creative
writing: a step has the states `ys` it began with, all proposals `new_ys` (each a state and what was
added to it), their `values` (or votes), and the selection `select_new_ys`.  `infos` holds the
verdict `r` on each of the final `ys`.

*Depth first* (a list), such as GPT-4's mini crosswords: an entry for every state that the search
went into, in that order, with the `actions` that lead to it, the `count` of words judged sure,
maybe and impossible, and the letters and words that are right (`info`).

*Samples* (`ys` without `steps`): independent answers, and the verdict or score `r` of each in
`infos`, or `accs` in older logs.

The last two have the problem's number only, so the length of the prompt must be given.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from arborsim.trace.importers.fields import Damage, array, field, finite, reward, text, whole
from arborsim.trace.importers.searches import (
    FinalAnswer,
    Lengths,
    Thought,
    ThoughtBatch,
    WrittenSearch,
    one_by_one,
)
from arborsim.trace.schema import End

#: What the program's search is called in the metadata of traces.
BREADTH_FIRST, DEPTH_FIRST, SAMPLES = "tot-bfs", "tot-dfs", "samples"


@dataclass(frozen=True)
class TotLog(Lengths):
    """How a log becomes searches."""

    #: The value that becomes reward 1: three votes of at most 20 ("sure"), as the program's value
    #: prompt for the Game of 24 scores them.  Depth-first logs have counts instead
    value_scale: float = 60.0

    def search_of(self, item: Any) -> WrittenSearch:
        """One problem, in whichever form it is, or a `Damage` if it contradicts itself."""
        if isinstance(item, list):
            return self._depth_first(item)
        if isinstance(item, dict) and "ys" in item and "steps" not in item:
            return self._samples(item)
        return self._breadth_first(item)

    def _breadth_first(self, item: Any) -> WrittenSearch:
        """Each step is a batch of proposals, after which the unselected are given up.

        The answer is right if any of the final states is (for b = 5: any of 5).  Its leaf is the
        first right one, or the first.  The verdict on each state stands at its block as well.  All
        proposals of the last step are finished.  One whose last line is ``Answer: ...`` answers it.

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
            thoughts, proposals = self._proposed(step, states, at)
            states = _selected(_texts(step, "select_new_ys", at), proposals, count, at)
            kept = {node for _, node in states}
            pruned = [node for node in range(count, count + len(thoughts)) if node not in kept]
            count += len(thoughts)
            batches.append(ThoughtBatch(thoughts, pruned))
        if _texts(item, "ys", "the end") != [state for state, _ in states]:
            raise Damage("the final ys are not what the last step selected")
        first = count - len(thoughts)
        verdicts = _verdicts(item, len(states))
        of_node = dict(zip((node for _, node in states), verdicts, strict=True))
        finished = [
            replace(thought, end=End.FINISHED, answer=_answer(state), correct=of_node.get(node, -1))
            for node, (thought, state) in enumerate(zip(thoughts, proposals, strict=True), first)
        ]
        batches[-1] = ThoughtBatch(finished, pruned)
        final = None
        if states:
            best = verdicts.index(max(verdicts))
            final = FinalAnswer(states[best][1], verdicts[best], states[best][0])
        return WrittenSearch(self.prompt(problem), batches, problem, final, BREADTH_FIRST)

    def _proposed(
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
            worth = reward(value, f"{at}: value {i}", self.value_scale)
            added = proposal[len(state) :]
            thoughts.append(Thought(node, self.thought(added), worth, added))
        return thoughts, proposals

    def _depth_first(self, visits: list[Any]) -> WrittenSearch:
        """A thought per visit, one after the other.  A child of a state further up is a return.

        What the search leaves when it goes back is given up, and so is a last state with an
        impossible word: the program goes on below no such state.  The reward is the mean over the
        words judged, a "maybe" counting half.  No words, no reward.  The answer is the deepest
        state, the first of equals, as in the paper.  Every state has a verdict, on all its words.

        It is a `Damage` if visits are out of order, or one continues no state of the path before
        it.
        """
        if not visits:
            raise Damage("there are no visits")
        thoughts: list[Thought] = []
        actions: list[str] = []
        numbers = [0]  # of the prompt and the states of the path
        deepest, best = 0, actions
        for index, visit in enumerate(visits):
            at = f"visit {index}"
            if whole(field(visit, "total_step"), f"{at}: total_step") != index:
                raise Damage(f"{at}: total_step is {visit['total_step']}")
            path = _texts(visit, "actions", at)
            above = path[:-1]
            if not path or above != actions[: len(above)]:
                raise Damage(f"{at}: actions continue no state of the path before it")
            count = field(visit, "count")
            words = [
                whole(field(count, name), f"{at}: {name}")
                for name in ("sure", "maybe", "impossible")
            ]
            worth = (words[0] + words[1] / 2) / sum(words) if any(words) else math.nan
            right = finite(field(field(visit, "info"), "r_word"), f"{at}: r_word", low=0.0)
            if right > 1:
                raise Damage(f"{at}: r_word is {right:g}, more than 1")
            written = path[-1]
            thought = Thought(
                numbers[len(above)], self.thought(written), worth, written, int(right == 1)
            )
            thoughts.append(thought)
            actions, numbers = path, [*numbers[: len(path)], len(thoughts)]
            if len(path) > len(best):
                deepest, best = len(thoughts), path
        batches = one_by_one(thoughts, ends_given_up=words[2] > 0)
        final = FinalAnswer(deepest, thoughts[deepest - 1].correct, "\n".join(best))
        return WrittenSearch(self.prompt(None), batches, None, final, DEPTH_FIRST)

    def _samples(self, item: Any) -> WrittenSearch:
        """All samples next to each other, each finished, with the answer as of breadth-first logs.

        A verdict (`r_game`, or a whole `r`) stands at the sample's block.  A score, `r` with a
        fraction, becomes its reward.
        """
        samples = _texts(item, "ys", "the samples")
        verdicts = _verdicts(item, len(samples))
        scores = _scores(item, self.value_scale) or [math.nan] * len(samples)
        thoughts = [
            Thought(0, self.thought(said), score, said, verdict, End.FINISHED, _answer(said))
            for said, score, verdict in zip(samples, scores, verdicts, strict=True)
        ]
        if not thoughts:
            raise Damage("there are no samples")
        known = [-math.inf if math.isnan(score) else score for score in scores]
        order = list(zip(verdicts, known, strict=True))
        best = order.index(max(order))
        final = FinalAnswer(best + 1, verdicts[best], samples[best])
        return WrittenSearch(self.prompt(None), [ThoughtBatch(thoughts)], None, final, SAMPLES)


def _texts(step: Any, name: str, at: str) -> list[str]:
    return [text(value, f"{at}: {name}") for value in array(field(step, name), f"{at}: {name}")]


def _selected(
    selection: list[str], proposals: list[str], first: int, at: str
) -> list[tuple[str, int]]:
    """The selected states and their nodes, where equal proposals are taken in order."""
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
    """A state's answer, if its last line has one."""
    line = state.strip().rpartition("\n")[2]
    label, colon, said = line.partition(":")
    return said.strip() if colon and label.strip().lower() == "answer" else None


def _verdicts(item: Any, count: int) -> list[int]:
    """The verdict on each final state, 1 or 0, or -1 for one with a score or nothing instead."""
    if "infos" not in item and "accs" in item:  # whole zeros in logs of tasks without a verdict
        accs = array(item["accs"], "accs")
        found = [int(each) if isinstance(each, bool) else -1 for each in accs]
    else:
        infos = array(field(item, "infos"), "infos")
        found = [_verdict(info, i) for i, info in enumerate(infos)]
    if len(found) != count:
        raise Damage(f"{len(found)} verdicts for {count} final ys")
    return found


def _verdict(info: Any, i: int) -> int:
    value = field(info, "r")
    game = info.get("r_game")
    if isinstance(game, bool):
        return int(game)
    return -1 if isinstance(value, float) else whole(value, f"verdict {i}", high=1)


def _scores(item: Any, scale: float) -> list[float]:
    """Rewards from infos whose `r` is a fraction, NaN for others, and nothing without infos."""
    values = [info["r"] for info in item.get("infos", ())]
    return [
        reward(value, f"score {i}", scale) if isinstance(value, float) else math.nan
        for i, value in enumerate(values)
    ]
