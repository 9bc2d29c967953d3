"""Verifiers that share no code with the tasks': they read words, not ids.

Slow and simple on purpose.  Each returns (correct, finished, dead).
"""

from __future__ import annotations

import re
from functools import cache


def _parse_program(prompt: str) -> tuple[dict[str, tuple[str, str, str]], str]:
    """Return the program, name -> (operand, op, operand) as words, and the query."""
    words = prompt.split()
    assert words[0] == "<bos>"
    assert words[-2] == "?"
    program = {}
    for at in range(1, len(words) - 3, 5):
        label, a, op, marker, b = words[at : at + 5]
        assert label[0] == "L"
        assert marker == "M" + label[1:]
        program[label[1:]] = (a.replace("U", "v"), op, b.replace("U", "v"))
    return program, words[-1].replace("U", "v")


def chain(prompt: str, reasoning: str) -> tuple[bool, bool, bool]:
    """Verify a reasoning by listing, at each line, all lines that may stand there."""
    program, query = _parse_program(prompt)
    values: dict[str, int] = {}

    def value(word: str) -> int:
        if word.isdigit():
            return int(word)
        if word not in values:
            a, op, b = program[word[1:]]
            sign = 1 if op == "+" else -1
            values[word] = (value(a) + sign * value(b)) % 10
        return values[word]

    def ancestors(word: str) -> set[str]:
        if word.isdigit():
            return set()
        a, _, b = program[word[1:]]
        return {word[1:]} | ancestors_cached(a) | ancestors_cached(b)

    ancestors_cached = cache(ancestors)
    needed = ancestors(query)
    order = list(program)
    answer = ["?", query, str(value(query))]
    words = reasoning.split()
    finished = "<eos>" in words or bool(re.search(r"\? \S+ \S+", reasoning))
    done: list[str] = []
    while True:
        candidates = []
        if needed <= set(done):
            candidates.append(answer)
        later = order[order.index(done[-1]) + 1 :] if done else order
        for n in later:
            a, op, b = program[n]
            if all(w.isdigit() or w[1:] in done for w in (a, b)):
                z = str(value("v" + n))
                candidates.append(
                    [f"L{n}", a, str(value(a)), op, f"M{n}", b, str(value(b)), f"v{n}", z]
                )
            if n in needed:
                break  # no line beyond the next needed one may come first
        fitting = [c for c in candidates if c == words[: len(c)]]
        if not fitting:
            partial = any(c[: len(words)] == words for c in candidates)
            return False, finished, not partial
        words = words[len(fitting[0]) :]
        if fitting[0] == answer:
            return True, True, False
        done.append(fitting[0][0][1:])


@cache
def reaches_24(numbers: tuple[int, ...]) -> bool:
    """Tell whether 24 can be made, by trying every expression as text."""
    if len(numbers) == 1:
        return numbers[0] == 24
    for i in range(len(numbers)):
        for j in range(len(numbers)):
            if i == j:
                continue
            rest = tuple(n for k, n in enumerate(numbers) if k not in (i, j))
            for op in "+-*/":
                if op == "/" and numbers[j] == 0:
                    continue
                result = eval(f"{numbers[i]}{op}{numbers[j]}")
                whole = result == int(result) and 0 <= result <= 199
                if whole and reaches_24(tuple(sorted((*rest, int(result))))):
                    return True
    return False


def game24(prompt: str, reasoning: str) -> tuple[bool, bool, bool]:
    """Verify whole lines with a regular expression."""
    numbers = sorted(map(int, re.findall(r"\d+", prompt)))
    pattern = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+) \( ((?:\d+ )+)\) [YN]( |$)")
    while len(numbers) > 1:
        if not reasoning:
            return False, False, False
        match = pattern.match(reasoning)
        if not match:
            return False, "<eos>" in reasoning, True
        x, op, y, r, rest, _ = match.groups()
        numbers = sorted(numbers)
        for operand in (x, y):
            if int(operand) not in numbers:
                return False, False, True
            numbers.remove(int(operand))
        if (op == "/" and int(y) == 0) or eval(f"{x}{op}{y}") != int(r):
            return False, False, True
        numbers.append(int(r))
        if sorted(map(int, rest.split())) != sorted(numbers) or not reaches_24(
            tuple(sorted(numbers))
        ):
            return False, False, True
        reasoning = reasoning[match.end() :]
    return numbers == [24], True, numbers != [24]
