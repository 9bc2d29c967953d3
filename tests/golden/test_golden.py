"""Results of the command line are what they were; `make.py --check` compares all of them."""

from __future__ import annotations

import pytest

from tests.golden import make
from tests.golden.cases import CASES, Case
from tests.golden.runner import Result, headings, numbers, run, same, visible

_QUICK = [case for case in CASES if case.quick and make.available(case)]


@pytest.fixture(scope="module")
def stored() -> dict[str, Result]:
    return make.read()


@pytest.fixture(scope="module")
def drift() -> make.Drift:
    return make.Drift()


@pytest.mark.parametrize("case", _QUICK, ids=lambda case: case.name)
def test_as_before(case: Case, stored: dict[str, Result], drift: make.Drift) -> None:
    old, new = stored[case.name], run(case)
    assert old.values or old.texts, "no golden is stored: python tests/golden/make.py"
    left = [each for each in make.compare(case, old, new) if not drift.explains(each)]
    if left:
        pytest.fail(f"{make.described(left)}\n{make.changed_words(old, new)[:4000]}", pytrace=False)


def test_every_explained_difference_is_there(drift: make.Drift) -> None:
    """Runs after the cases."""
    assert drift.unused(case.name for case in _QUICK) == []


def test_every_case_is_stored(stored: dict[str, Result]) -> None:
    for case in CASES:
        assert stored[case.name].values or stored[case.name].texts, case.name


def test_differences_are_seen() -> None:
    case = Case("example", ())
    old = Result({("a", "bytes"): 3, ("a", "seconds"): 1.0, ("b", "name"): "x"}, {"p.txt": "7 MB"})
    close = Result({**old.values, ("a", "seconds"): 1.0 + 1e-12, ("a", "new"): 1}, {"p.txt": "7"})
    assert make.compare(case, old, close) == []
    other = Result({("a", "bytes"): 4, ("a", "seconds"): 1.0 + 1e-6}, {"p.txt": "8 MB"})
    found = make.compare(case, old, other)
    assert [each.column for each in found] == ["bytes", "seconds", "name", "number"]
    assert "4 values differ" in make.described(found)
    assert same(2, 2.0)
    assert same(0.5, 0.5 + 1e-7, "output_error")
    assert not same(0.5, 0.5 + 1e-7, "seconds")
    assert not same(0.5, 0.5 + 1e-5, "output_error")
    assert not same(0, None)
    assert not same(True, 1)


def test_the_text_of_a_page() -> None:
    page = "<h2>Speed</h2><style>a{}</style><table><tr><th>MB</th><th>s</th></tr><tr><td>1</td>"
    text = visible(f"{page}<td>2.5e-3</td></tr></table><p>of <b>1,024</b> tokens")
    assert text == "## Speed\n= MB | s\n1 | 2.5e-3\nof 1,024 tokens\n"
    assert headings(text) == {"Speed", "MB", "s"}
    assert set(numbers(text)) == {"1", "2.5e-3", "1,024"}
