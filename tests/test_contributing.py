"""The worked example of CONTRIBUTING.md does what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from arborsim.cli.app import main
from tests.helpers.traces import make_trace

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()


def test_a_policy_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = re.search(r"<!-- example: policy -->\n```python\n(.*?)```", TEXT, re.DOTALL)
    assert code
    (tmp_path / "my_policies.py").write_text(code.group(1))
    monkeypatch.syspath_prepend(tmp_path)
    trace = make_trace(tmp_path / "x.parquet", kind="linear", prompt=20, nodes=8)
    command = f"replay {trace} --policy my_policies:LateMover --budget 0.7 --set recent=8"
    assert main(command.split()) == 0
    assert "late-mover" in capsys.readouterr().out


def test_a_policy_from_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = re.search(r"<!-- example: composition -->\n```toml\n(.*?)```", TEXT, re.DOTALL)
    assert text
    file = tmp_path / "my-mix.toml"
    file.write_text(text.group(1))
    trace = make_trace(tmp_path / "x.parquet", kind="tree", prompt=20, nodes=12)
    command = (
        f"replay {trace} --policy {file},arborkv --budget 0.8 --set my-mix.allocate.alpha=1.5 "
        "--set margin=4 --set my-mix.schedule.slack=4 --set protect.recent=8"
    )
    assert main(command.split()) == 0
    assert "my-mix" in capsys.readouterr().out
    assert main(["policies", str(file)]) == 0
    assert "allocate.alpha" in capsys.readouterr().out
