"""Budgets as users write them."""

import pytest

from arborsim.core.errors import UsageError
from arborsim.core.tiers import Budget


@pytest.mark.parametrize(
    ("text", "full", "tokens"),
    [("2048", 10_000, 2048), ("0.25", 1000, 250), ("1", 1000, 1000), ("1.0", 7, 7), ("0.001", 5, 1),
     ("2", 9, 2), ("1e3", 9, 1000)],
)  # fmt: skip
def test_tokens_and_shares(text: str, full: int, tokens: int) -> None:
    assert Budget.parse(text).in_tokens(full) == tokens


@pytest.mark.parametrize("text", ["0", "-1", "-0.5", "1.5", "x", "", "nan", "inf", "12.5"])
def test_what_is_no_budget(text: str) -> None:
    with pytest.raises(UsageError, match="budget"):
        Budget.parse(text)
