"""Calibration files: what is written is read, what cannot be right is refused in one line."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from arborsim.core.errors import UsageError
from arborsim.policies.registry import build
from arborsim.products.calibrate.documents import Calibration, apply, read_calibration


def made(**changes: object) -> Calibration:
    values: dict[str, object] = {
        "kind": "bands",
        "model": "a model",
        "layers": 6,
        "traces": 10,
        "tokens": 5000,
        "seed": 0,
        "command": 'arborsim calibrate bands --out "b.toml"',
        "policies": {"epikv": {"layer_a": 0.5, "layer_b": 1 / 3}, "h2o": {"shared": True}},
        "evidence": {"rho": [0.5, float("-inf")], "deep er": {"text": "é \\ \x7f\n"}},
    }
    return Calibration(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    calibration = made(policies={"epikv": {"layer_a": 0.5, "layer_b": 1 / 3}})
    (tmp_path / "good.toml").write_text(calibration.to_toml(), encoding="utf-8")
    return tmp_path


def test_toml_reads_back_as_it_was() -> None:
    calibration = made()
    document = tomllib.loads(calibration.to_toml())
    assert document["policies"] == calibration.policies
    assert document["evidence"] == calibration.evidence
    assert document["calibration"]["command"] == calibration.command
    assert document["calibration"]["layers"] == 6


def test_read_calibration(folder: Path) -> None:
    found = read_calibration(folder / "good.toml")
    assert found.policies["epikv"] == {"layer_a": 0.5, "layer_b": 1 / 3}
    assert (found.layers, found.traces, found.source) == (6, 10, str(folder / "good.toml"))


def test_calibrated_settings_build_the_policy_and_the_users_win(folder: Path) -> None:
    chosen = {"epikv": {"layer_b": "0.9"}, "full": {}}
    settings = apply(chosen, [read_calibration(folder / "good.toml")], {"t.parquet": 6})
    assert settings == {"epikv": {"layer_a": "0.5", "layer_b": "0.9"}, "full": {}}
    assert build("epikv", settings["epikv"]) == build("epikv", {"layer_a": ".5", "layer_b": ".9"})
    assert chosen == {"epikv": {"layer_b": "0.9"}, "full": {}}


def test_another_depth_is_refused(folder: Path) -> None:
    calibration = read_calibration(folder / "good.toml")
    with pytest.raises(UsageError, match=r"made for 6 layers .*b\.parquet was recorded on 32"):
        apply({"epikv": {}}, [calibration], {"a.parquet": 6, "b.parquet": 32})


def test_policies_that_were_not_chosen_are_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"is for epikv: none of them is a chosen policy"):
        apply({"h2o": {}}, [read_calibration(folder / "good.toml")], {"a.parquet": 6})


def test_two_files_that_set_the_same_are_refused(folder: Path) -> None:
    (folder / "other.toml").write_text(made(policies={"epikv": {"layer_a": 0.1}}).to_toml())
    both = [read_calibration(folder / name) for name in ("good.toml", "other.toml")]
    with pytest.raises(UsageError, match=r"good\.toml and .*other\.toml both set epikv\.layer_a"):
        apply({"epikv": {}}, both, {"a.parquet": 6})


BAD = {
    "not TOML": ("layers = = 3", "not valid TOML"),
    "some other TOML": ("[tool]\nname = 'x'", "not a calibration"),
    "empty": ("", "not a calibration"),
    "no such policy": ("[policies.epikw]\nlayer_a = 0.1", "did you mean epikv"),
    "no such setting": ("[policies.epikv]\nlayer_c = 0.1", "did you mean layer_"),
    "out of range": ("[policies.epikv]\nlayer_a = 1.5", "layer_a must be in [0, 1]"),
    "of another type": ("[policies.epikv]\nlayer_a = 'deep'", "layer_a must be a number"),
    "a list": ("[policies.epikv]\nlayer_a = [0.1]", "layer_a must be"),
    "no settings": ("[policies.epikv]", "must hold settings"),
    "no policies": ("[policies]", "no policy is calibrated"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_calibration_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    text, says = BAD[case]
    head = made().to_toml().partition("[policies")[0] if text.startswith("[policies") else ""
    path = tmp_path / "bad.toml"
    path.write_text(head + text)
    with pytest.raises(UsageError) as caught:
        read_calibration(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"), [("layers", "six"), ("layers", True), ("kind", "bend"), ("seed", 0.5)]
)
def test_wrong_head_fields_are_refused(field: str, value: object, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(made(**{field: value}, policies={"epikv": {"layer_a": 0.5}}).to_toml())
    with pytest.raises(UsageError, match=field):
        read_calibration(path)


def test_missing_files_and_unknown_names() -> None:
    with pytest.raises(UsageError, match="no such calibration file"):
        read_calibration("nowhere.toml")
    with pytest.raises(UsageError, match="unknown calibration 'nowhere'"):
        read_calibration("nowhere")


@pytest.mark.parametrize("name", ["chain-arkv", "chain-bands", "chain-msve"])
def test_shipped_calibrations_apply(name: str) -> None:
    calibration = read_calibration(name)
    assert f"{name}.toml" in calibration.command
    settings = apply(
        {p: {} for p in calibration.policies}, [calibration], {"x": calibration.layers}
    )
    for policy, values in settings.items():
        changed = build(policy, values)
        assert all(getattr(changed, key) == value
                   for key, value in calibration.policies[policy].items())  # fmt: skip
