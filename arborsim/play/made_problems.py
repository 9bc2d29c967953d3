"""Problems that are made here, by seed: what a small language model can and cannot do.

`needle-N` hides a pass key in about N tokens of text.  `mapping-N` shows N examples of a mapping of
names and asks for another.  `sum` and `sums` ask, after three examples, for one and two steps of
arithmetic, a thought per line.  `pairs-N` lists N records and asks for one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from arborsim.core.errors import UnknownName, UsageError

COUNT = 200
_SEED = 0x6D616465
_TOKENS_PER_SENTENCE, _TOKENS_AROUND = 11.0, 54  # of SmolLM2, template included


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_NAMES = _words(
    "Ada Ben Cleo Dan Eva Finn Gus Hana Ivo Jane Kai Lea Max Nia Otto Pia Quinn Rosa Sam Tess "
    "Uma Vera Will Yara Zoe"
)
_SURNAMES = _words(
    "Abel Brook Cole Drake Ellis Frost Grant Hayes Irwin Jones King Lane Moss Nash Owen Page "
    "Reed Stone Todd Wells"
)
_THINGS = _words("apples books coins eggs marbles pencils shells stamps")
_SUBJECTS = _words(
    "river baker garden teacher train window sailor village forest painter market bridge farmer "
    "castle winter"
)
_VERBS = _words("watched followed reached passed remembered crossed visited described")
_ADJECTIVES = _words("quiet old narrow bright distant green heavy gentle empty busy")

Made = tuple[str, str]  # a prompt and its answer


def _text(rng: np.random.Generator, sentences: int) -> list[str]:
    """Sentences that hold no number and no name."""
    words = (_ADJECTIVES, _SUBJECTS, _VERBS, _ADJECTIVES, _SUBJECTS)
    picked = zip(*(rng.choice(each, sentences) for each in words), strict=True)
    return ["The {} {} {} the {} {} in the evening.".format(*each) for each in picked]


def _needle(rng: np.random.Generator, tokens: int) -> Made:
    key = str(rng.integers(10_000, 100_000))
    sentences = _text(rng, max(1, round((tokens - _TOKENS_AROUND) / _TOKENS_PER_SENTENCE)))
    sentences.insert(int(rng.integers(0, len(sentences) + 1)), f"The pass key is {key}.")
    text = " ".join(sentences)
    return f"{text}\nWhat is the pass key? Answer with the number alone.", key


def _mapping(rng: np.random.Generator, examples: int) -> Made:
    every = [(first, last) for first in _NAMES for last in _SURNAMES]
    picked = [every[i] for i in rng.permutation(len(every))[: examples + 1]]
    lines = [f"{first} {last} -> {last}, {first}\n" for first, last in picked[:-1]]
    first, last = picked[-1]
    return f"{''.join(lines)}{first} {last} ->", f"{last}, {first}"


def _sums(rng: np.random.Generator, steps: int) -> Made:
    """Three worked examples, then the question."""
    *worked, asked = (_sum(rng, steps) for _ in range(4))
    question, _, answer = asked
    return f"{''.join(q + thoughts for q, thoughts, _ in worked)}{question}", answer


def _sum(rng: np.random.Generator, steps: int) -> tuple[str, str, str]:
    """A question, its thoughts, one per line, and the answer."""
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    now, *more = (int(each) for each in rng.integers(2, 21, steps + 1))
    said, thoughts = [f"{name} has {now} {thing}."], [f" {name} has {now} {thing}."]
    for each in more:
        away = now > each and rng.random() < 0.4
        then = now - each if away else now + each
        said.append(f"{name} gives {each} away." if away else f"{name} finds {each} more.")
        thoughts.append(f"{said[-1]} {now} {'-' if away else '+'} {each} = {then}.")
        now = then
    question = " ".join([*said, f"How many {thing} does {name} have now?"])
    end = f"The answer is {now}.\n\n"
    return f"Question: {question}\nAnswer:", "\n".join([*thoughts, end]), str(now)


def _pairs(rng: np.random.Generator, records: int) -> Made:
    keys = rng.permutation(np.arange(100, 1000))[:records]
    values = rng.integers(100, 1000, records)
    lines = [f"record {key}: value {value}\n" for key, value in zip(keys, values, strict=True)]
    asked = int(rng.integers(records))
    question = f"\nThe value of one of these records again:\nrecord {keys[asked]}: value"
    return "".join([*lines, question]), str(values[asked])


_Maker = Callable[[np.random.Generator, int], Made]
#: By name: what makes them, and the number that follows the name, if any does.
_KINDS: dict[str, tuple[_Maker, tuple[int, int]]] = {
    "needle": (_needle, (128, 32_768)),
    "mapping": (_mapping, (1, 400)),
    "pairs": (_pairs, (1, 900)),
    "sum": (_sums, (1, 1)),
    "sums": (_sums, (2, 2)),
}
#: As they are listed to those who look for one.
NAMES = (
    "needle-512",
    "needle-1024",
    "needle-2048",
    "needle-4096",
    "mapping-20",
    "sum",
    "sums",
    "pairs-10",
)


def make_problems(name: str, count: int = COUNT) -> tuple[str, list[Made]]:
    """The kind of problems of that name, and the problems, the same every time.

    Raises `UsageError`: there is no such name, or its number is out of range.
    """
    kind, dash, given = name.partition("-")
    if kind not in _KINDS or (dash and not given.isdigit()):
        raise UnknownName("made problem set", name, NAMES)
    maker, (least, most) = _KINDS[kind]
    if not dash and least < most:
        raise UsageError(f"made:{name} needs a number: {kind}-{20 if least < 20 else 1024}")
    size = int(given) if dash else least
    if not least <= size <= most:
        raise UsageError(f"made:{name}: {kind} goes from {least} to {most}")
    seeds = [_SEED, *kind.encode(), size]
    return kind, [maker(np.random.default_rng([*seeds, index]), size) for index in range(count)]
