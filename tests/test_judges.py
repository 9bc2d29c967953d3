"""Judges read answers where they stand, and compare them as their kind is compared."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from arborsim.core.errors import UsageError
from arborsim.play.judges import judge_named
from arborsim.play.made_problems import NAMES, make_problems
from arborsim.play.problem_sets import RECIPES, ProblemChoice, read_problems

#: Judge, text, right answer: the verdict, and how the text goes on from where the answer begins.
CASES: list[tuple[str, str, str, bool, str | None]] = [
    ("number", "3 + 4 = 7.\nThe answer is 7.", "5 + 2 = 7\n#### 7", True, "7."),
    ("number", "so $1,250.00 in all", "1250", True, "$1,250.00 in all"),
    ("number", "it is 3/4 of it", "0.75", True, "3/4 of it"),
    ("number", "-3 and 4", "-4", False, "4"),
    ("number", "\\boxed{12} of 30", "12", True, "12} of 30"),
    ("number", "none at all", "0", False, None),
    ("number", "0.3333333", "1/3", True, "0.3333333"),
    ("choice", "I think A, but the answer is (b).", "B", True, "b)."),
    ("choice", "Not A.\nC", "(C)", True, "C"),
    ("choice", "It's plain", "I", False, None),
    ("exact", "first\n  Paris \n\n", "Paris", True, "Paris \n\n"),
    ("exact", "Paris.", "Paris", False, "Paris."),
    ("boxed", "hence $\\boxed{\\dfrac{1}{2}}$", "\\frac12", True, "\\dfrac{1}{2}}$"),
    ("boxed", "\\boxed{a} then \\boxed{ \\text{(b)} }", "(b)", True, " \\text{(b)} }"),
    ("boxed", "\\boxed{0.5}", "\\frac{1}{2}", True, "0.5}"),
    ("boxed", "one half", "\\frac12", False, None),
    ("contains", "The capital is paris, of course", "Paris", True, "paris, of course"),
    ("contains", "key 12345", "2345", False, "key 12345"),
    ("regex:^So (\\w+)", "So a\nSo bee then", "bee", True, "bee then"),
    ("regex:\\d+", "1 and 22", "22", True, "22"),
]


@pytest.mark.parametrize(("name", "text", "truth", "right", "rest"), CASES)
def test_judges(name: str, text: str, truth: str, right: bool, rest: str | None) -> None:
    judge = judge_named(name)
    assert judge.right(text, truth) is right
    found = judge.read(text, truth)
    assert (None if found is None else text[found.start :]) == rest


def test_a_function_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("my_judge")
    module.longer = lambda text, truth: len(text) > int(truth)  # type: ignore[attr-defined]
    module.number = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_judge", module)
    judge = judge_named("my_judge:longer")
    assert judge.right("four", "3")
    assert not judge.right("four", "4")
    with pytest.raises(UsageError, match=r"my_judge:longer raised ValueError: .*'many'"):
        judge.right("four", "many")
    with pytest.raises(UsageError, match="no function"):
        judge_named("my_judge:number")
    with pytest.raises(UsageError, match="'my_judge:none' cannot be imported: AttributeError"):
        judge_named("my_judge:none")


def written(folder: Path, *entries: Any) -> str:
    path = folder / "own.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return str(path)


def test_fields_templates_and_choices(tmp_path: Path) -> None:
    entry = {"question": "Which?", "choices": {"text": ["red", "blue"]}, "answer": 1}
    found = read_problems(ProblemChoice(written(tmp_path, entry), recipe="choice"))
    assert found.name == "own"
    assert found.prompts[0].startswith("Which?\nA. red\nB. blue\nThink step by step.")
    assert found.answers == ("B",)
    assert found.right(0, "The answer is B.")
    plain = written(tmp_path, {"q": "1+1?", "a": 2}, {"q": "{x}", "a": 3})
    choice = ProblemChoice(plain, "number", {"prompt": "q", "answer": "a"})
    found = read_problems(choice)
    assert (found.prompts, found.answers) == (("1+1?", "{x}"), ("2", "3"))
    assert read_problems(ProblemChoice(plain, fields={"prompt": "q"})).judge is None


BAD: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "answer": ([{"prompt": "a", "answer": 1}, {"prompt": "b", "gold": 2}], {"judge": "number"},
               r'own\.jsonl, line 2: no "answer" to judge by \(it has prompt, gold: --field'),
    "prompt": ([{"question": "a"}], {}, r"line 1: expected \{\"prompt\".*question: --field prompt"),
    "number": ([{"prompt": "a", "answer": "x"}], {"judge": "number"}, "'x' cannot be judged by n"),
    "letter": ([{"prompt": "a", "answer": "AB"}], {"judge": "choice"}, "it is no single letter"),
    "empty": ([{"prompt": "a", "answer": " "}], {"judge": "exact"}, "it is empty"),
    "list": ([{"prompt": "a", "answer": [1]}], {"judge": "exact"}, "must be a text or a number"),
    "judge": ([{"prompt": "a"}], {"judge": "nubmer"}, r"unknown judge 'nubmer'.*number"),
    "regex": ([{"prompt": "a"}], {"judge": "regex:("}, r"--judge regex:\(: no regular expression"),
    "recipe": ([{"prompt": "a"}], {"recipe": "gsm"}, "unknown recipe 'gsm'.*gsm8k"),
    "field": ([{"prompt": "a"}], {"fields": {"promt": "q"}}, "--field promt"),
    "none": ([], {}, "no prompts"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_judged_is_refused_in_a_line(name: str, tmp_path: Path) -> None:
    entries, options, expected = BAD[name]
    with pytest.raises(UsageError, match=expected) as refused:
        read_problems(ProblemChoice(written(tmp_path, *entries), **options))
    assert "\n" not in str(refused.value)


def test_data_sets_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = ProblemChoice("hf:owner/maths:main@train", recipe="gsm8k")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match="pip install datasets"):
        read_problems(choice)
    module, asked = types.ModuleType("datasets"), []

    def load(name: str, config: str | None, split: str) -> list[dict[str, str]]:
        asked.append((name, config, split))
        return [{"question": "1+1?", "answer": "so\n#### 2"}]

    module.load_dataset = load  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    found = read_problems(choice)
    assert asked == [("owner/maths", "main", "train")]
    assert (found.name, found.right(0, "2")) == ("maths", True)


@pytest.mark.parametrize("name", NAMES)
def test_made_problems_are_the_same_every_time_and_hold_their_answers(name: str) -> None:
    made = read_problems(ProblemChoice(f"made:{name}"))
    assert len(made.prompts) == len(made.answers) == 200
    assert len(set(made.prompts)) >= 199
    _, again = make_problems(name, 20)
    assert list(zip(made.prompts[:20], made.answers[:20], strict=True)) == again
    assert made.judge is not None
    for prompt, answer in zip(made.prompts, made.answers, strict=True):
        assert made.judge.right(f" {answer}", answer)
        if name.startswith(("needle", "pairs")):
            assert answer in prompt
    if name.startswith("sum"):  # the examples are right themselves
        *worked, asked = made.prompts[0].split("Question: ")[1:]
        assert [made.judge.right(text.rpartition("answer")[0], text) for text in worked] == [
            True
        ] * 3
        assert asked.endswith("Answer:")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("needle", "needs a number: needle-1024"),
        ("needle-10", "goes from 128"),
        ("sonnets", "sums"),
    ],
)
def test_made_problems_that_do_not_exist(name: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        read_problems(ProblemChoice(f"made:{name}"))
    with pytest.raises(UsageError, match="--recipe is for files"):
        read_problems(ProblemChoice("made:sum", recipe="gsm8k"))


def test_recipes_name_judges_that_exist() -> None:
    for recipe in RECIPES.values():
        assert judge_named(recipe.judge).name == recipe.judge
        assert recipe.template.format(prompt="x").startswith("x")
