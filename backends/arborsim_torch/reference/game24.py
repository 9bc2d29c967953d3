"""Task `game24`: the Game of 24, one operation per thought.

The prompt lists the numbers, each reasoning line combines two of them, lists
what remains and states whether 24 can still be reached::

    <bos> ( 4 6 8 13 )
    13 - 8 = 5 ( 4 6 5 ) Y   6 * 5 = 30 ( 4 30 ) N   30 - 4 = 26 ( 26 ) N <eos>

Y or N is the model's own value of the state.  All numbers are integers in
0..199, differences non-negative, divisions exact.  Of the 1,820 multisets of
four numbers in 1..13, 1,346 can be solved under these rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement

import numpy as np

from .tasks import BOS, EOS, PAD, Problem, Readers, Task, ValueReadout, Verdict, Vocabulary

TARGET = 24
LARGEST = 199  #: largest number that has a token
HIGHEST_CARD = 13
TEST_PROBLEMS = 269
#: Tokens of each reasoning line: expression 5, brackets 2, value 1, remainder.
LINE_TOKENS = (11, 10, 9)
LINE_ENDS = (11, 21, 30)
_SPLIT_SEED = 24


@dataclass(frozen=True)
class Move:
    """One operation: ``x op y = result``."""

    x: int
    op: str
    y: int
    result: int


@dataclass(frozen=True)
class Numbers:
    """The problem: four numbers, ascending."""

    numbers: tuple[int, ...]


def apply(x: int, op: str, y: int) -> int | None:
    """Return ``x op y``, or None where the rules forbid it."""
    if op == "+":
        result = x + y
    elif op == "-":
        result = x - y
    elif op == "*":
        result = x * y
    elif op == "/" and y != 0 and x % y == 0:
        result = x // y
    else:
        return None
    return result if 0 <= result <= LARGEST else None


def moves(numbers: Sequence[int]) -> Iterator[Move]:
    """Yield every distinct legal move on `numbers`; sums and products in both orders."""
    seen: set[tuple[int, int]] = set()
    for i, x in enumerate(numbers):
        for j, y in enumerate(numbers):
            if i == j or (x, y) in seen:
                continue
            seen.add((x, y))
            for op in "+-*/":
                result = apply(x, op, y)
                if result is not None:
                    yield Move(x, op, y, result)


def remainder(numbers: Sequence[int], move: Move) -> tuple[int, ...]:
    """Return what remains: the untouched numbers in order, then the result."""
    rest = list(numbers)
    rest.remove(move.x)
    rest.remove(move.y)
    return (*rest, move.result)


def solvable(numbers: Sequence[int]) -> bool:
    """Tell whether 24 can be reached from `numbers` under the rules."""
    return _solvable(tuple(sorted(numbers)))


@cache
def _solvable(numbers: tuple[int, ...]) -> bool:
    if len(numbers) == 1:
        return numbers[0] == TARGET
    return any(solvable(remainder(numbers, move)) for move in moves(numbers))


@cache
def splits() -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the fixed division of the 1,346 solvable multisets: 1,077 and 269."""
    hands = combinations_with_replacement(range(1, HIGHEST_CARD + 1), 4)
    puzzles = [hand for hand in hands if solvable(hand)]
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(puzzles))
    shuffled = [puzzles[i] for i in order]
    return {"test": tuple(shuffled[:TEST_PROBLEMS]), "train": tuple(shuffled[TEST_PROBLEMS:])}


class Game24Task(Task):
    """Combine four numbers into 24."""

    name = "game24"
    max_tokens = LINE_ENDS[-1] + 1
    step_tokens = max(LINE_TOKENS)

    def __init__(self) -> None:
        numbers = map(str, range(LARGEST + 1))
        super().__init__(Vocabulary([PAD, BOS, EOS, *"+-*/=()YN", *numbers]))
        self.value_readout = ValueReadout(self.vocab["Y"], self.vocab["N"])

    def problem(self, split: str, index: int) -> Problem:
        """Return puzzle `index` of `split`; raises IndexError beyond the last."""
        hand = splits()[split][index]
        return Problem(self.name, split, index, tuple(self.prompt(hand)), Numbers(hand))

    def num_problems(self, split: str) -> int | None:
        """Return 1,077 for "train", 269 for "test"."""
        return len(splits()[split])

    def prompt(self, numbers: Sequence[int]) -> list[int]:
        """Return the prompt's ids: 7 for four numbers."""
        return self.vocab.encode([BOS, "(", *map(str, numbers), ")"])

    def line(self, numbers: Sequence[int], move: Move) -> list[int]:
        """Return the ids of the line that plays `move` on `numbers`."""
        rest = remainder(numbers, move)
        words = [str(move.x), move.op, str(move.y), "=", str(move.result)]
        words += ["(", *map(str, rest), ")", "Y" if solvable(rest) else "N"]
        return self.vocab.encode(words)

    def solution(self, problem: Problem) -> list[int]:
        """Return the first solution in the order of `moves`."""
        numbers: tuple[int, ...] = problem.data.numbers
        ids: list[int] = []
        while len(numbers) > 1:
            move = next(m for m in moves(numbers) if solvable(remainder(numbers, m)))
            ids += self.line(numbers, move)
            numbers = remainder(numbers, move)
        return ids

    def is_finished(self, problem: Problem, generated: Sequence[int]) -> bool:
        """Tell whether three lines were written, or the end marker."""
        return len(generated) >= LINE_ENDS[-1] or self.eos_id in generated

    def answer_text(self, generated: Sequence[int]) -> str | None:
        """Return the number that the third line leaves; None if it was not written."""
        if len(generated) < LINE_ENDS[-1] or self.eos_id in generated[: LINE_ENDS[-1]]:
            return None
        return self.text(generated[LINE_ENDS[-1] - 3 : LINE_ENDS[-1] - 2])

    def is_thought_end(
        self, problem: Problem, generated: Sequence[int], block_tokens: int = 0
    ) -> bool:
        """Tell whether the last token closes a line."""
        return len(generated) in LINE_ENDS or self.is_finished(problem, generated)

    def judge(self, problem: Problem, generated: Sequence[int]) -> Verdict:
        """Verify token by token; what follows the third line is ignored.

        The remainder may be listed in any order.  A wrong Y or N is a wrong
        opinion, not a wrong step, and does no harm.  A move that makes 24
        unreachable is death, as soon as its second operand is written.
        """
        tokens = list(generated[: LINE_ENDS[-1]])
        ended = self.eos_id in tokens
        if ended:
            tokens = tokens[: tokens.index(self.eos_id)]
        finished = ended or len(tokens) == LINE_ENDS[-1]
        words = [self.vocab.vocab[token] for token in tokens]
        numbers: tuple[int, ...] = problem.data.numbers
        start = 0
        for step, length in enumerate(LINE_TOKENS):
            part = words[start : start + length]
            after = _follow(numbers, part)
            if after is None or (ended and len(part) < length):
                return Verdict(False, finished, True, step / 3, 0)
            if len(part) < length:
                return Verdict(False, False, False, step / 3, LINE_ENDS[-1] - len(tokens))
            numbers = after
            start += length
        return Verdict(True, True, False, 1.0, 0)

    def steps(self, problem: Problem, generated: Sequence[int]) -> tuple[int, int]:
        """Return how many operations keep 24 reachable, up to the first that does not; of three."""
        steps = len(LINE_TOKENS)
        return round(steps * self.judge(problem, generated).progress), steps

    def readers(self, problem: Problem, generated: Sequence[int], start: int = 0) -> list[Readers]:
        """Return who reads each token (`Task.readers`); steps are lines, from 0.

        A line reads the numbers that were left before it: those of the prompt, or between the
        brackets of the line before.
        """
        prompt = len(problem.prompt)
        rows: list[Readers] = [(0, 0)] * max(0, prompt - start)
        for at in range(max(0, start - prompt), len(generated)):
            line = sum(at >= end for end in LINE_ENDS)
            if line == len(LINE_ENDS):
                rows.append((line, line))
                continue
            inside = at - LINE_ENDS[line] + LINE_TOKENS[line]
            left = (line + 1,) if 5 <= inside < LINE_TOKENS[line] - 1 else ()
            rows.append((line + (inside == LINE_TOKENS[line] - 1), line, *left))
        return rows

    def is_value_next(self, problem: Problem, generated: Sequence[int]) -> bool:
        """Tell whether the next token is a line's Y or N."""
        return len(generated) + 1 in LINE_ENDS


def _follow(numbers: tuple[int, ...], part: Sequence[str]) -> tuple[int, ...] | None:
    """Follow the (partial) line `part` played on `numbers`.

    Returns the numbers as the line lists them (in the order of `numbers` while
    the line is incomplete), or None where no winning line starts like this.
    """
    head = tuple(part[:5])
    fitting = [
        m
        for m in moves(numbers)
        if (str(m.x), m.op, str(m.y), "=", str(m.result))[: len(head)] == head
        and solvable(remainder(numbers, m))
    ]
    if not fitting:
        return None
    if len(part) <= 5:
        return numbers
    rest = remainder(numbers, fitting[0])
    count = len(rest)
    listed = part[6 : 6 + count]
    if part[5] != "(" or Counter(listed) - Counter(map(str, rest)):
        return None
    if len(part) > 6 + count and part[6 + count] != ")":
        return None
    if len(part) > 7 + count:
        return tuple(map(int, listed)) if part[7 + count] in "YN" else None
    return numbers
