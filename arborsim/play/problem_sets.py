"""Problems of one's own: prompts, and the answers that they are judged by.

They are JSON lines, a data set of Hugging Face (``hf:NAME``), or made here (``made:NAME``).  A
recipe says for a known benchmark which fields hold what, how a prompt is put, and what judges.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from arborsim.core.errors import UnknownName, UsageError
from arborsim.play.judges import Judge, judge_named
from arborsim.play.made_problems import make_problems

#: A line of a file.
PROMPT = '{"prompt": "..."}'
HUB, MADE = "hf:", "made:"
_STEPS = "{prompt}\nThink step by step. Then write the answer as: The answer is"
_BOXED = "{prompt}\nReason step by step, and put your final answer within \\boxed{{}}."


@dataclass(frozen=True)
class Recipe:
    """How problems of a benchmark are put and judged."""

    prompt: str = "prompt"  #: the field that holds it
    answer: str = "answer"
    template: str = "{prompt}"  #: how it is said to the model
    judge: str = ""  #: as `judge_named` knows it; "" for none
    #: A text that ends a reasoning, besides the model's own end
    ends: tuple[str, ...] = ()
    chat: bool = False  #: in the tokeniser's chat template, if there is one
    max_tokens: int = 0  #: generated ones; 0 for the default


RECIPES = {
    "gsm8k": Recipe("question", "answer", _STEPS + " NUMBER.", "number", chat=True),
    "math500": Recipe("problem", "answer", _BOXED, "boxed", chat=True, max_tokens=2048),
    "aime": Recipe("problem", "answer", _BOXED, "number", chat=True, max_tokens=8192),
    "choice": Recipe("question", "answer", _STEPS + " LETTER.", "choice", chat=True),
    "needle": Recipe(judge="contains", ends=("\n",), chat=True, max_tokens=32),
}
_LINE = Recipe(judge="contains", ends=("\n",), max_tokens=16)
_THOUGHTS = Recipe(judge="number", ends=("\n\n",), max_tokens=96)
#: How problems made here are put, by kind (`arborsim.play.made_problems`).
_MADE_RECIPES = {
    "needle": replace(_LINE, chat=True, max_tokens=24),
    "mapping": _LINE,
    "pairs": _LINE,
    "sum": _THOUGHTS,
    "sums": _THOUGHTS,
}


@dataclass(frozen=True)
class ProblemChoice:
    """Which problems, as options name them."""

    source: str  #: a file, ``hf:NAME[:CONFIG][@SPLIT]`` or ``made:NAME``
    judge: str = ""
    #: The field that holds "prompt" or "answer", where another one does
    fields: Mapping[str, str] = field(default_factory=dict)
    recipe: str = ""

    @property
    def name(self) -> str:
        """The name of the problems in results."""
        if self.source.startswith(MADE):
            return self.source.removeprefix(MADE)
        if not (self.judge or self.recipe):
            return "prompts"
        named = self.source.removeprefix(HUB).partition("@")[0].partition(":")[0]
        return named.rpartition("/")[2] if self.path is None else Path(self.source).stem

    @property
    def path(self) -> Path | None:
        """The file, if it is one."""
        return None if self.source.startswith((HUB, MADE)) else Path(self.source)


@dataclass(frozen=True)
class ProblemSet:
    """Prompts as they are said to the model, and their right answers if they are judged."""

    name: str
    prompts: tuple[str, ...]
    answers: tuple[str, ...] = ()  #: empty without a judge
    judge: Judge | None = None
    recipe: Recipe = Recipe()

    def right(self, index: int, text: str) -> bool | None:
        """Whether a text answers a problem right; None without a judge."""
        return None if self.judge is None else self.judge.right(text, self.answers[index])


def read_problems(choice: ProblemChoice) -> ProblemSet:
    """The problems of a choice.

    Raises `UsageError`: file and line that are wrong, a judge or recipe that does not exist, a data
    set that cannot be had.
    """
    if choice.recipe and choice.recipe not in RECIPES:
        raise UnknownName("recipe", choice.recipe, RECIPES)
    wrong = sorted(set(choice.fields) - {"prompt", "answer"})
    if wrong:
        raise UsageError(f"--field {wrong[0]}=...: give prompt=NAME or answer=NAME")
    recipe = RECIPES[choice.recipe] if choice.recipe else Recipe()
    if choice.source.startswith(MADE):
        return _made(choice)
    named = choice.fields.get
    recipe = replace(
        recipe, prompt=named("prompt", recipe.prompt), answer=named("answer", recipe.answer)
    )
    judge = judge_named(choice.judge or recipe.judge) if choice.judge or recipe.judge else None
    prompts, answers = [], []
    for where, entry in _entries(choice):
        prompts.append(recipe.template.format(prompt=_prompt(where, entry, recipe)))
        if judge is not None:
            answers.append(_answer(where, entry, recipe, judge))
    if not prompts:
        raise UsageError(f"{choice.source}: no prompts; write one {PROMPT} per line")
    return ProblemSet(choice.name, tuple(prompts), tuple(answers), judge, recipe)


def _made(choice: ProblemChoice) -> ProblemSet:
    if choice.recipe or choice.fields:
        what = "--recipe" if choice.recipe else "--field"
        raise UsageError(f"{what} is for files and data sets: {choice.source} needs none")
    kind, made = make_problems(choice.name)
    recipe = _MADE_RECIPES[kind]
    prompts, answers = zip(*made, strict=True)
    judge = judge_named(choice.judge or recipe.judge)
    return ProblemSet(choice.name, prompts, answers, judge, recipe)


def _entries(choice: ProblemChoice) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Each entry, and where it stands."""
    if choice.path is None:
        return _of_hub(choice.source)
    lines = read_lines(choice.path, PROMPT)
    return [(f"{choice.path}, line {number}", entry) for number, entry in lines]


def _prompt(where: str, entry: Mapping[str, Any], recipe: Recipe) -> str:
    prompt = entry.get(recipe.prompt)
    if not isinstance(prompt, str) or not prompt:
        expected = PROMPT.replace("prompt", recipe.prompt)
        raise UsageError(f"{where}: expected {expected}{_instead(entry, recipe.prompt)}")
    choices = entry.get("choices")
    texts = choices.get("text") if isinstance(choices, Mapping) else choices
    if isinstance(texts, Sequence) and not isinstance(texts, str):
        prompt += "".join(f"\n{chr(65 + i)}. {text}" for i, text in enumerate(texts))
    return prompt


def _answer(where: str, entry: Mapping[str, Any], recipe: Recipe, judge: Judge) -> str:
    if recipe.answer not in entry:
        given = _instead(entry, recipe.answer)
        raise UsageError(f'{where}: no "{recipe.answer}" to judge by{given}')
    answer = entry[recipe.answer]
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise UsageError(f"{where}: {recipe.answer} must be a text or a number")
    if judge.name == "choice" and isinstance(answer, int) and 0 <= answer < 26:
        answer = chr(65 + answer)  # the number of the choice
    if why := judge.check(str(answer)):
        raise UsageError(
            f"{where}: {recipe.answer} {str(answer)[:60]!r} cannot be judged by {judge.name}: {why}"
        )
    return str(answer)


def _instead(entry: Mapping[str, Any], wanted: str) -> str:
    """The fields that the entry has instead of the wanted one."""
    others = [str(key) for key in entry if key != wanted][:6]
    role = "answer" if wanted == "answer" else "prompt"
    return f" (it has {', '.join(others)}: --field {role}=NAME)" if others else ""


def _of_hub(source: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Entries of a data set, by the library `datasets`."""
    name, _, split = source.removeprefix(HUB).partition("@")
    name, _, config = name.partition(":")
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise UsageError(
            f"{source}: this needs datasets, which is not installed: pip install datasets, or give "
            "a file of JSON lines"
        ) from None
    try:
        rows = datasets.load_dataset(name, config or None, split=split or "test")
        return [(f"{source}, row {i}", dict(row)) for i, row in enumerate(rows)]
    except Exception as error:  # whatever a data set that is not there leads to
        why = " ".join(str(error).split())[:200]
        raise UsageError(f"{source}: cannot be loaded: {why}") from error


def read_text(path: Path, what: str = "text") -> str:
    """A file of UTF-8 text, which is not empty.  A `UsageError` names the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file of {what}") from None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{path}: cannot be read as UTF-8 text ({why})") from error
    if what == "text" and not text.strip():
        raise UsageError(f"{path}: the text is empty")
    return text


def read_lines(path: Path, expected: str) -> list[tuple[int, Mapping[str, Any]]]:
    """The objects of a JSON-lines file with their line numbers, empty lines skipped.

    Raises `UsageError`, which names file and line that are wrong.  `expected` belongs there.
    """
    found = []
    for number, line in enumerate(read_text(path, "prompts").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as problem:
            why = getattr(problem, "msg", str(problem))
            raise UsageError(f"{path}, line {number}: not JSON ({why})") from problem
        if not isinstance(entry, Mapping):
            raise UsageError(f"{path}, line {number}: expected {expected}")
        found.append((number, entry))
    if not found:
        raise UsageError(f"{path}: no prompts; write one {expected} per line")
    return found
