"""Straight-line programs modulo 10: what problems of task `chain` are about.

How a program is written down and reasoned about is the task's
(`arborsim_torch.reference.chain`); here is what it computes, and how it is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

NAMES = 128  #: names per class; programs must be shorter
MAX_LINES = 125
MODULUS = 10
CONSTANT_PROBABILITY = 0.1  #: share of operands that are digits, not results
RECENT_PROBABILITY = 0.2  #: share drawn from the last `RECENT_LINES` lines only
RECENT_LINES = 8


@dataclass(frozen=True)
class Program:
    """A straight-line program modulo 10 and the result that is asked for."""

    offset: int  #: number of the first line's name; line k is called (offset + k) mod 128
    ops: tuple[str, ...]  #: per line "+" or "-"
    #: per line two operands: k >= 0 is the result of line k, -1 - d the digit d
    operands: tuple[tuple[int, int], ...]
    query: int  #: the line whose result is asked for

    @property
    def lines(self) -> int:
        """Number of program lines."""
        return len(self.ops)

    @cached_property
    def values(self) -> tuple[int, ...]:
        """The result of every line."""
        done: list[int] = []
        for op, (a, b) in zip(self.ops, self.operands, strict=True):
            x, y = (done[k] if k >= 0 else -1 - k for k in (a, b))
            done.append((x + y if op == "+" else x - y) % MODULUS)
        return tuple(done)

    @cached_property
    def needed(self) -> tuple[int, ...]:
        """The query and its ancestors, ascending: the lines that must be evaluated."""
        found: set[int] = set()
        stack = [self.query]
        while stack:
            k = stack.pop()
            if k not in found:
                found.add(k)
                stack.extend(j for j in self.operands[k] if j >= 0)
        return tuple(sorted(found))


def random_program(rng: np.random.Generator, lines: int) -> Program:
    """Draw a program of `lines` lines.

    An operand is a digit with probability 0.1 (always in the first line), the
    result of one of the last 8 lines with probability 0.2, else uniform over all
    earlier lines.  The query is uniform over the last quarter of the lines.
    """
    if not 1 <= lines <= MAX_LINES:
        raise ValueError(f"lines must be in 1..{MAX_LINES}, not {lines}")
    source = rng.random((lines, 2))
    constant = source < CONSTANT_PROBABILITY
    constant[0] = True
    recent = source > 1.0 - RECENT_PROBABILITY
    digits = rng.integers(0, MODULUS, (lines, 2))
    here = np.arange(lines)[:, None]
    first = np.where(recent, np.maximum(0, here - RECENT_LINES), 0)
    earlier = (first + rng.random((lines, 2)) * (here - first)).astype(int)
    chosen = np.where(constant, -1 - digits, earlier).tolist()
    ops = rng.integers(0, 2, lines).tolist()
    return Program(
        offset=int(rng.integers(NAMES)),
        ops=tuple("+-"[i] for i in ops),
        operands=tuple((a, b) for a, b in chosen),
        query=int(rng.integers(lines - max(1, lines // 4), lines)),
    )


def woven_program(rng: np.random.Generator, lines: int, needed: float = 0.75) -> Program:
    """Draw a program of which the stated share of lines is needed for the answer.

    The last needed line is asked for.  Every other needed line is read by a needed line that is
    drawn from all later ones; what operands are left are digits with probability 0.1, else results
    of earlier needed lines.  The others read any earlier line, and no needed line reads them.
    """
    if not 1 <= lines <= MAX_LINES:
        raise ValueError(f"lines must be in 1..{MAX_LINES}, not {lines}")
    count = max(1, round(needed * lines))
    chosen = np.sort(rng.permutation(lines)[:count]).tolist()
    operands: list[list[int | None]] = [[None, None] for _ in range(lines)]
    for place in range(count - 2, -1, -1):
        free = [(k, i) for k in chosen[place + 1 :] for i in (0, 1) if operands[k][i] is None]
        reader, i = free[rng.integers(len(free))]
        operands[reader][i] = chosen[place]
    filled = []
    for k in range(lines):
        earlier = [j for j in chosen if j < k] if k in chosen else list(range(k))
        pair = []
        for operand in operands[k]:
            if operand is None:
                digit = not earlier or rng.random() < CONSTANT_PROBABILITY
                operand = (
                    -1 - int(rng.integers(MODULUS))
                    if digit
                    else earlier[rng.integers(len(earlier))]
                )
            pair.append(operand)
        filled.append((pair[0], pair[1]))
    return Program(
        offset=int(rng.integers(NAMES)),
        ops=tuple("+-"[i] for i in rng.integers(0, 2, lines)),
        operands=tuple(filled),
        query=chosen[-1],
    )
