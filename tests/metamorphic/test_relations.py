"""A few cases of every relation; `tests.metamorphic.run` draws more."""

from __future__ import annotations

import pytest

from tests.metamorphic.relations import RELATIONS
from tests.metamorphic.run import hold


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("name", RELATIONS)
def test_relations_hold(name: str, number: int) -> None:
    hold(name, number)
