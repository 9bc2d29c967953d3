"""Calibrations in plans: they set what the workload leaves open, and the appendix names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from arborsim.core.errors import UsageError
from arborsim.products.plan.files import fingerprint
from arborsim.products.plan.provenance import settings_of
from arborsim.products.plan.workload import Workload
from arborsim.products.plan.workload_file import parse_workload
from tests.plan.make import SMALL

_OWN = '{ use = "streaming-llm", name = "mine", set = { sinks = 9 } }'


def _file(folder: Path, policy: str = "streaming-llm", layers: int = 32) -> Path:
    """A calibration of sinks; generated searches are those of llama-3.1-8b, of 32 layers."""
    path = folder / f"{policy}.toml"
    path.write_text(
        f'[calibration]\nkind = "msve"\nmodel = "m"\nlayers = {layers}\ntraces = 1\ntokens = 1\n'
        f'seed = 0\ncommand = "none"\n\n[policies.{policy}]\nsinks = 7\n'
    )
    return path


def _workload(base: Path, *calibrations: str, named: str = "") -> Workload:
    policies = f'policies = ["full", "streaming-llm", {_OWN}]\n{named}'
    text = SMALL.replace('policies = ["full", "streaming-llm"]', policies)
    return parse_workload(text, base, calibrations=calibrations)


def _sinks(workload: Workload) -> list[int]:
    return [getattr(choice.policy, "sinks", 0) for choice in workload.policies]


def test_measured_settings_fill_what_the_workload_leaves_open(tmp_path: Path) -> None:
    assert _sinks(_workload(tmp_path)) == [0, 4, 9]
    assert _sinks(_workload(tmp_path, str(_file(tmp_path)))) == [0, 7, 9]


def test_a_workload_names_calibrations_next_to_itself(tmp_path: Path) -> None:
    _file(tmp_path)
    found = _workload(tmp_path, named='calibrations = ["streaming-llm.toml"]')
    assert _sinks(found) == [0, 7, 9]


def test_the_appendix_names_the_file_and_another_file_is_another_plan(tmp_path: Path) -> None:
    bare, found = _workload(tmp_path), _workload(tmp_path, str(_file(tmp_path)))
    told = settings_of(found)["calibration streaming-llm.toml"]
    assert told.startswith("msve of streaming-llm, measured on m (32 layers, seed 0), sha256 ")
    assert "calibration streaming-llm.toml" not in settings_of(bare)
    assert settings_of(found)["policy streaming-llm"] == "adaptation path, pin_prompt off, sinks 7"
    assert fingerprint(found) != fingerprint(bare)


def test_calibrations_that_do_not_belong_here_are_refused(tmp_path: Path) -> None:
    for path, said in (
        (_file(tmp_path, layers=6), "was made for 6 layers .m., trees was recorded on 32"),
        (tmp_path / "missing.toml", "no such calibration file"),
    ):
        with pytest.raises(UsageError, match=rf"\[candidates\] calibrations: .*{said}"):
            _workload(tmp_path, str(path))
    twice = str(_file(tmp_path))
    with pytest.raises(UsageError, match="is named twice"):
        _workload(tmp_path, twice, twice)
    other = _file(tmp_path, "h2o")
    with pytest.raises(UsageError, match="is for h2o: none of them is a chosen policy"):
        _workload(tmp_path, str(other))
