"""Simulated experiments for claims: a finished cell is kept, whatever happens in the next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from arborsim.core.tables import read_table
from benchmarks.claims import Store, run


def test_a_run_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    ran: list[Any] = []

    def rows(beta: float) -> Iterator[dict[str, Any]]:
        ran.append(beta)
        if len(ran) == 3:
            raise KeyboardInterrupt
        yield from ({"episode": k, "hbm_bytes": int(1000 * beta) + k} for k in range(3))

    def experiments(store: Store) -> None:
        store.cell("other", {"name": "x"}, lambda: [{"seed": 1, "share": 0.25, "fits": True}])
        for beta in (0.3, 0.5, 0.7):
            store.cell("grid", {"beta": beta, "policy": "h"}, lambda beta=beta: rows(beta))

    out = ["--out", str(tmp_path / "new")]
    with pytest.raises(KeyboardInterrupt):
        run("paper", experiments, out)
    stored, _ = read_table(tmp_path / "new" / "paper.parquet")
    assert stored["beta"].dropna().tolist() == [0.3] * 3 + [0.5] * 3  # 0.7 left nothing behind
    run("paper", experiments, out)
    assert ran == [0.3, 0.5, 0.7, 0.7]
    first = (tmp_path / "new" / "paper.parquet").read_bytes()
    run("paper", experiments, out)
    assert len(ran) == 4
    assert (tmp_path / "new" / "paper.parquet").read_bytes() == first
    run("paper", experiments, [*out, "--again", "grid"])
    assert ran[4:] == [0.3, 0.5, 0.7]
    frame, about = read_table(tmp_path / "new" / "paper.parquet")
    assert about["command"] == "python -m benchmarks.claims.paper"
    grid = frame[frame["experiment"] == "grid"]
    assert grid["hbm_bytes"].tolist() == [1000 * b / 10 + k for b in (3, 5, 7) for k in range(3)]
    other = frame[frame["experiment"] == "other"].iloc[0]
    assert (other["share"], other["fits"]) == (0.25, True)
    assert pd.isna(other["beta"])
    assert list((tmp_path / "new").iterdir()) == [tmp_path / "new" / "paper.parquet"]


@pytest.mark.parametrize(
    ("setting", "rows", "said"),
    [
        ({"beta": 0.5}, [], "no rows"),
        ({"beta": 0.5}, [{"beta": 0.7}], "change a setting"),
        ({"gamma": 0.5}, [{"x": 1}], "differ from earlier cells"),
    ],
)
def test_a_cell_that_could_not_be_found_again_is_refused(
    tmp_path: Path, setting: dict[str, float], rows: list[dict[str, float]], said: str
) -> None:
    store = Store("paper", tmp_path)
    store.cell("grid", {"beta": 0.3}, lambda: [{"x": 1}])
    with pytest.raises(ValueError, match=said):
        store.cell("grid", setting, lambda: rows)
