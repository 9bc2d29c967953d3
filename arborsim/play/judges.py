"""Judges of answers in text: what a reasoning answers, where, and whether that is right.

A judge is named: ``number``, ``choice``, ``exact``, ``boxed``, ``contains``, ``regex:PATTERN``, or
a function of one's own, ``package.module:function``, of a text and the right answer.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.plugins import named_object

JUDGES = ("exact", "number", "choice", "boxed", "contains")
_NUMBER = re.compile(r"[-+]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s*/\s*[1-9]\d*)?|[-+]?\.\d+")
_CHOICE = re.compile(r"(?:\(|\b)([A-Z])(?:\)|\b(?!['’]))")
_SAID = re.compile(r"answer\s*(?:is|:)?\s*:?\s*\**\(?([A-Za-z])\b", re.IGNORECASE)
_LINE = re.compile(r"[^\n]*\S[^\n]*")
_SPACING = re.compile(r"\\[!,;: ]|\\left|\\right|[\s$]")
_CLOSE = Fraction(1, 10**6)  # of the larger of two numbers that are written with decimals


class Answer(NamedTuple):
    """An answer that was read out of a text, and the character at which it begins."""

    text: str
    start: int


class Judge(ABC):
    """Reads answers, and compares them with right ones."""

    name: str

    @abstractmethod
    def read(self, text: str, truth: str) -> Answer | None:
        """The answer that a text gives; None if it gives none."""

    def right(self, text: str, truth: str) -> bool:
        """Whether a text answers right."""
        found = self.read(text, truth)
        return found is not None and self.same(found.text, truth)

    def same(self, answer: str, truth: str) -> bool:
        """Whether an answer that was read is the right one."""
        return answer == truth.strip()

    def check(self, truth: str) -> str:
        """Why this can be no right answer; "" if it can."""
        return "" if truth.strip() else "it is empty"


class _Exact(Judge):
    name = "exact"

    def read(self, text: str, truth: str) -> Answer | None:
        """The last line that is not empty."""
        found = _last(_LINE, text)
        if found is None:
            return None
        line = found.group()
        return Answer(line.strip(), found.start() + len(line) - len(line.lstrip()))


class _Number(Judge):
    name = "number"

    def read(self, text: str, truth: str) -> Answer | None:
        """The last number, of the last box if there is one."""
        begin, end = _box(text) or (0, len(text))
        found = _last(_NUMBER, text[begin:end])
        return None if found is None else Answer(found.group(), begin + found.start())

    def same(self, answer: str, truth: str) -> bool:
        ours, known = _number(answer), _number(truth)
        assert ours is not None, "`read` found a number"
        assert known is not None, "`check` found a number"
        if ours.denominator == known.denominator == 1:
            return ours == known
        return abs(ours - known) <= _CLOSE * max(abs(ours), abs(known))

    def check(self, truth: str) -> str:
        return "" if _number(truth) is not None else "it holds no number"


class _Choice(Judge):
    name = "choice"

    def read(self, text: str, truth: str) -> Answer | None:
        """The letter that is said to be the answer, else the last capital on its own."""
        found = _last(_SAID, text) or _last(_CHOICE, text)
        return None if found is None else Answer(found.group(1).upper(), found.start(1))

    def same(self, answer: str, truth: str) -> bool:
        return answer == truth.strip().strip("()").upper()

    def check(self, truth: str) -> str:
        return "" if re.fullmatch(r"\(?[A-Za-z]\)?", truth.strip()) else "it is no single letter"


class _Boxed(Judge):
    name = "boxed"

    def read(self, text: str, truth: str) -> Answer | None:
        """The contents of the last ``\\boxed{}``."""
        found = _box(text)
        return None if found is None else Answer(text[slice(*found)], found[0])

    def same(self, answer: str, truth: str) -> bool:
        known = _box(truth)
        texts = [_plain(each) for each in (answer, truth[slice(*known)] if known else truth)]
        ours, right = (Fraction(each) if _is_number(each) else None for each in texts)
        return texts[0] == texts[1] or (ours is not None and ours == right)


class _Contains(Judge):
    name = "contains"

    def read(self, text: str, truth: str) -> Answer | None:
        """The right answer itself, as whole words; else the last line."""
        wanted = re.escape(truth.strip())
        found = _last(re.compile(rf"(?<!\w){wanted}(?!\w)", re.IGNORECASE), text)
        return _Exact().read(text, truth) if found is None else Answer(found.group(), found.start())

    def same(self, answer: str, truth: str) -> bool:
        return answer.casefold() == truth.strip().casefold()


class _Regex(Judge):
    def __init__(self, pattern: str) -> None:
        self.name = f"regex:{pattern}"
        try:
            self._pattern = re.compile(pattern, re.MULTILINE)
        except re.error as error:
            raise UsageError(f"--judge {self.name}: no regular expression ({error})") from None

    def read(self, text: str, truth: str) -> Answer | None:
        """The first group of the last match, or all of it."""
        found = _last(self._pattern, text)
        if found is None:
            return None
        group = 1 if self._pattern.groups else 0
        return None if found[group] is None else Answer(found[group].strip(), found.start(group))


class _Own(Judge):
    """A function of the text and the right answer that says whether they agree."""

    def __init__(self, name: str, function: Callable[[str, str], object]) -> None:
        self.name, self._function = name, function

    def read(self, text: str, truth: str) -> Answer | None:
        return _Exact().read(text, truth)

    def right(self, text: str, truth: str) -> bool:
        try:
            return bool(self._function(text, truth))
        except Exception as error:
            why = " ".join(str(error).split())[:200]
            raise UsageError(
                f"--judge {self.name} raised {type(error).__name__}: {why} (the answer to judge by "
                f"was {truth[:80]!r})"
            ) from error


_NAMED: dict[str, type[Judge]] = {
    kind.name: kind for kind in (_Exact, _Number, _Choice, _Boxed, _Contains)
}


def judge_named(name: str) -> Judge:
    """The judge of that name.

    Raises `UsageError`: there is none, a pattern is wrong, or a function cannot be imported.
    """
    if name in _NAMED:
        return _NAMED[name]()
    kind, colon, rest = name.partition(":")
    if kind == "regex" and colon:
        return _Regex(rest)
    if not colon:
        raise UnknownName("judge", name, [*JUDGES, "regex:PATTERN", "package.module:function"])
    function = named_object("judge", name, "package.module:function")
    if not callable(function):
        raise UsageError(f"--judge {name}: that is no function")
    return _Own(name, function)


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = None
    for found in pattern.finditer(text):  # noqa: B007
        pass
    return found


def _number(text: str) -> Fraction | None:
    """The last number of a text."""
    found = _Number().read(text, "")
    if found is None:
        return None
    whole, _, divisor = re.sub(r"[$,\s]", "", found.text).partition("/")
    return Fraction(whole) / Fraction(divisor or 1)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[-+]?(\d+(\.\d+)?|\.\d+|\d+/[1-9]\d*)", text) is not None


def _box(text: str) -> tuple[int, int] | None:
    """Where the contents of the last whole ``\\boxed{}`` lie."""
    for found in reversed(list(re.finditer(r"\\f?boxed\s*\{", text))):
        depth = 1
        for at in range(found.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if not depth:
                return found.end(), at
    return None


def _plain(text: str) -> str:
    """A formula without what does not change its value."""
    text = _SPACING.sub("", text.strip().rstrip("."))
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac\{?(\d+)\}?\{?([1-9]\d*)\}?", r"\1/\2", text)
    text = re.sub(r"\\(?:text|mathrm)\{([^{}]*)\}", r"\1", text)
    return re.sub(r"(?<=\d),(?=\d{3}\b)", "", re.sub(r"\\%|%|\\circ|\^\{?\\circ\}?", "", text))
