"""Every search once more, literally: straight from its definition, slow, on whole paths.

States and thoughts are paths, tuples of child numbers; () is the prompt.  Nothing is kept between
decisions that can be counted anew.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction

from tests.search.bank import Bank


def literal_samples(bank: Bank, n: int) -> tuple[list, list]:
    """Each chain on its own, to its end; returns all thoughts, and the finished ones.

    Both in order of opening: chains take turns.
    """
    made = []
    for k in range(n):
        chain = (k,)
        made.append(chain)
        while not any(bank.child(chain)[1:]):
            chain = (*chain, 0)
            made.append(chain)
    made.sort(key=lambda s: (len(s), s[0]))
    return made, [s for s in made if bank.child(s)[1]]


def elected(
    bank: Bank, made: list, finished: list, vote: Callable[[tuple], float] | None = None
) -> tuple:
    """The best thought of the answer with the most votes; without `vote`, the best of all.

    Ties go to what is first in `finished`; where nothing is finished, to the best thought `made`.
    """
    if not finished:
        return max(made, key=lambda s: bank.child(s)[0])
    if vote is None:
        return max(finished, key=lambda s: bank.child(s)[0])
    texts = list(dict.fromkeys(bank.text(s) for s in finished))
    votes = [math.fsum(vote(s) for s in finished if bank.text(s) == text) for text in texts]
    winner = texts[votes.index(max(votes))]
    return max((s for s in finished if bank.text(s) == winner), key=lambda s: bank.child(s)[0])


def literal_levels(bank: Bank, width: int, depth: int, share) -> tuple[list, list]:
    """Level by level; `share` maps scored states and a width to [(state, children)].

    Returns all thoughts, and the finished ones.
    """
    level, made, finished = [()], [], []
    for step in range(depth):
        width -= sum(s != () and bank.child(s)[1] for s in level)
        finished += [s for s in level if s != () and bank.child(s)[1]]
        open_ = [s for s in level if s == () or not any(bank.child(s)[1:])]
        if width <= 0 or not open_:
            return made, finished
        if step == 0:
            level = [(k,) for k in range(width)]
        else:
            ranked = sorted(open_, key=lambda s: (-bank.child(s)[0], made.index(s)))
            level = [(*s, k) for s, count in share(ranked, width) for k in range(count)]
        made += level
    return made, finished + [s for s in level if bank.child(s)[1]]


def literal_dvts(bank: Bank, width: int, subtrees: int, depth: int) -> tuple[list, list]:
    """Every subtree on its own: its part of the first level, then always the best child.

    Returns all thoughts, and the finished ones, level by level.
    """
    size, larger = divmod(width, subtrees)
    made, start = [], 0
    for i in range(subtrees):
        left = size + (i < larger)
        level = [(start + k,) for k in range(left)]
        start += left
        for _ in range(depth):
            made += level
            left -= sum(bank.child(s)[1] for s in level)
            open_ = [s for s in level if not any(bank.child(s)[1:])]
            if not open_ or left <= 0:
                break
            best = max(open_, key=lambda s: (bank.child(s)[0], -s[-1]))
            level = [(*best, k) for k in range(left)]
    made.sort(key=len)
    return made, [s for s in made if bank.child(s)[1]]


def printed(scores: list[float], width: int, temperature: str = "0.2") -> list[int]:
    """The loop of REBASE in 50 digits, scores descending."""
    counts = []
    with localcontext(prec=50):
        weights = [(Decimal(str(score)) / Decimal(temperature)).exp() for score in scores]
        for i, weight in enumerate(weights):
            share = width * weight / sum(weights[i:])
            near = share.to_integral_value()
            exact = near if abs(share - near) < Decimal("1e-30") else share  # its own rounding
            counts.append(math.ceil(exact))
            width -= counts[-1]
    return counts


def literal_bfs(bank: Bank, keep: int, children: int, levels: int) -> tuple[list, list]:
    """Yao et al., Algorithm 1; returns (all thoughts in order, kept states at the end)."""
    states, thoughts = [()], []

    def grows(s: tuple) -> bool:
        return s == () or not (bank.child(s)[1] or (levels and len(s) >= levels))

    while any(grows(s) for s in states):
        candidates = []
        for s in states:
            proposed = [(*s, k) for k in range(children)] if grows(s) else []
            thoughts += proposed
            candidates += proposed or [s]
        alive = [s for s in candidates if not bank.child(s)[2]]
        states = sorted(alive, key=lambda s: (-bank.child(s)[0], thoughts.index(s)))[:keep]
    return thoughts, states


def literal_dfs(bank: Bank, threshold: float, relative: float, children: int, steps: int,
                propose: int) -> list:  # fmt: skip
    """Yao et al., Algorithm 2, recursive; thoughts in order, stops at value >= 0.9 at an end."""
    thoughts: list = []

    class Stop(Exception):
        pass

    def visit(state: tuple, value: float) -> None:
        waiting: list = []
        made = 0
        while True:
            if not waiting:
                if made == children:
                    return
                for _ in range(min(propose, children - made)):
                    if len(thoughts) == steps:
                        raise Stop
                    child = (*state, made)
                    made += 1
                    thoughts.append(child)
                    score, finished, dead = bank.child(child)
                    if finished and score >= 0.9:
                        raise Stop
                    bar = max(threshold, relative * value)
                    if score >= bar and not finished and not dead:
                        waiting.append(child)
            if waiting:
                best = max(waiting, key=lambda c: (bank.child(c)[0], -c[-1]))
                waiting.remove(best)
                visit(best, bank.child(best)[0])

    with contextlib.suppress(Stop):
        visit((), 0.0)
    return thoughts


def literal_dpts(
    bank: Bank, width: int, steps: int, most: int = 3, early: float = 0.8, deep: float = 0.8,
    warm_up: int = 5,
) -> list:  # fmt: skip
    """The rules of Ding et al., one completed thought at a time."""
    c = 1 / math.sqrt(2)
    reward: dict = {}
    opened = {(): 0}
    running: list = []  # thoughts in order of opening
    on: list = [None] * width  # the state whose child a slot decodes
    role = ["exploit"] * ((width + 1) // 2) + ["explore"] * (width // 2)
    follow: list = [None] * width
    lost: set = set()
    thoughts: list = []

    def below(s: tuple) -> list:
        return [r for p, r in reward.items() if len(p) > len(s) and p[: len(s)] == s]

    def ucb(s: tuple) -> float:
        seen = below(s)
        mean = sum(seen) / len(seen) if seen else 0.0
        own = reward.get(s, mean)
        return mean + c * math.sqrt(1 + len(below(s[:-1]))) * own / (1 + len(seen))

    while True:
        for slot in sorted(range(width), key=lambda i: follow[i] is None):
            if on[slot] is not None or len(thoughts) >= steps:
                continue
            states = [
                s for s in opened
                if s == () or (s in reward and not bank.child(s)[1] and s not in lost)
            ]  # fmt: skip
            states.sort(key=lambda s: -1 if s == () else thoughts.index(s))
            pick, follow[slot] = follow[slot], None
            if pick is None or pick not in states:
                others = [i for i in range(width) if i != slot and (on[i] is not None or follow[i])]
                exploiting = sum(role[i] == "exploit" for i in others)
                role[slot] = "exploit" if exploiting < (width + 1) // 2 else "explore"
                fresh = [s for s in states if opened[s] == 0]
                room = [s for s in states if opened[s] < (max(most, width) if s == () else most)]
                if role[slot] == "exploit" and fresh:
                    pick = max(fresh, key=lambda s: reward.get(s, -math.inf))
                elif room:
                    pick = max(room, key=ucb)
                else:
                    continue
            thought = (*pick, opened[pick])
            opened[pick] += 1
            opened[thought] = 0
            thoughts.append(thought)
            running.append(thought)
            on[slot] = pick
        if not running:
            return thoughts
        thought = running.pop(0)
        score, finished, dead = bank.child(thought)
        reward[thought] = score
        if finished and score >= 0.9:
            return thoughts
        # Slots on the same state are interchangeable: the first of them takes the result.
        slot = on.index(thought[:-1])
        on[slot] = None
        if dead:
            lost.add(thought)
        if finished or dead:
            continue
        mean = sum(reward.values()) / len(reward)
        warm = len(reward) >= warm_up
        if role[slot] == "exploit":
            if warm and score < early * mean:
                lost.add(thought)
            else:
                follow[slot] = thought
        elif warm and score > deep * mean:
            role[slot], follow[slot] = "exploit", thought


def literal_mcts(bank: Bank, width: int, children: int, steps: int, w: float = 1.0) -> list:
    """UCT from its definition, all statistics counted anew for each choice."""
    thoughts: list = []
    complete: list = []

    def inside(s: tuple, some: list) -> list:
        return [t for t in some if t[: len(s)] == s]

    def uct(s: tuple) -> float:
        rewards = [bank.child(t)[0] for t in inside(s, complete)]
        n = len(inside(s, thoughts))
        return sum(rewards) / len(rewards) + w * math.sqrt(
            math.log(len(inside(s[:-1], thoughts))) / n
        )

    def places(s: tuple) -> list:
        """States at or below s that may have another child, found depth first."""
        if s != () and (s not in complete or any(bank.child(s)[1:])):
            return []
        mine = [t for t in thoughts if len(t) == len(s) + 1 and t[: len(s)] == s]
        if len(mine) < children:
            return [s]
        return [p for t in mine for p in places(t)]

    while True:
        while len(thoughts) < steps and len(thoughts) - len(complete) < width and places(()):
            s: tuple = ()
            while s not in places(s):
                below = [t for t in thoughts if t[:-1] == s and places(t)]
                s = max(below, key=lambda t: (uct(t), -thoughts.index(t)))
            made = sum(t[:-1] == s for t in thoughts)
            thoughts.append((*s, made))
        if len(thoughts) == len(complete):
            return thoughts
        complete.append(thoughts[len(complete)])
        reward, finished, _ = bank.child(complete[-1])
        if finished and reward >= 0.9:
            return thoughts


def literal_refill(bank: Bank, width: int, keep: int, depth: int) -> tuple[list, list]:
    """The beam search of transformers, on thoughts; returns all of them, and the finished pool.

    The best `keep` of a level's thoughts that are finished join the pool, of which the best `keep`
    stay; the best `keep` others share the width.
    """
    beam, made, pool = [()], [], []
    for _ in range(depth):
        shares = [width // len(beam) + (i < width % len(beam)) for i in range(len(beam))]
        level = [(*s, k) for s, share in zip(beam, shares, strict=True) for k in range(share)]
        made += level
        alive = [s for s in level if not bank.child(s)[2]]
        ranked = sorted(alive, key=lambda s: (-bank.child(s)[0], made.index(s)))
        pool += [s for s in ranked[:keep] if bank.child(s)[1]]
        pool = sorted(pool, key=lambda s: (-bank.child(s)[0], made.index(s)))[:keep]
        beam = [s for s in ranked if not bank.child(s)[1]][:keep]
        if len(pool) == keep or not beam:
            break
    return made, pool


@dataclass
class Scored(Bank):
    """The same bank, whose thoughts are rewarded with the scores of their paths."""

    score: str = "last"

    def child(self, path: tuple[int, ...]) -> tuple[float, bool, bool]:
        rewards = [super(Scored, self).child(path[:i])[0] for i in range(1, len(path) + 1)]
        _, finished, dead = super().child(path)
        if self.score == "min":
            score = sorted(rewards)[0]
        elif self.score == "prod":
            score = rewards[0]
            for reward in rewards[1:]:
                score *= reward
        elif self.score == "mean":
            score = float(sum(map(Fraction, rewards))) / len(rewards)
        else:
            score = rewards[-1]
        return score, finished, dead
