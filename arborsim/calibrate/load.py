"""Read calibrations and turn them into settings of policies."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from arborsim.calibrate.document import KINDS, Calibration
from arborsim.core.errors import UnknownName, UsageError
from arborsim.policies.registry import build

Settings = dict[str, dict[str, str]]

_FIELDS: dict[str, type] = {
    "kind": str, "model": str, "layers": int, "traces": int, "tokens": int, "seed": int,
    "command": str,
}  # fmt: skip
_MADE_BY = "make one with `arborsim calibrate`"


def shipped() -> dict[str, Path]:
    """Calibrations that come with arborsim, by name."""
    folder = Path(str(files("arborsim.calibrate") / "shipped"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def read_calibration(path: Path | str) -> Calibration:
    """The calibration in the file `path`, or the shipped one of that name.

    Raises
    ------
    UsageError
        One line: there is no such file, it is no calibration, or it gives a policy what the policy
        does not take.
    """
    path = Path(path)
    if path.suffix != ".toml" and not path.exists():
        try:
            path = shipped()[str(path)]
        except KeyError:
            raise UnknownName("calibration", str(path), shipped()) from None
    calibration = _parse(_load(path), path)
    for policy, settings in calibration.policies.items():
        try:
            build(policy, _as_text(settings))
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None
    return calibration


def apply(
    settings: Mapping[str, Mapping[str, str]],
    calibrations: Sequence[Calibration],
    recorded: Mapping[str, int],
) -> Settings:
    """Settings of the chosen policies, calibrated.

    Parameters
    ----------
    settings : mapping of policy to mapping of name to text
        All chosen policies with what the user set; that wins over calibrations.
    calibrations : sequence of Calibration
    recorded : mapping of str to int
        Layers of the model that each trace was recorded on, by the trace's name.

    Returns
    -------
    dict
        New; in the form that `arborsim.policies.registry.build` takes.

    Raises
    ------
    UsageError
        A calibration was made on a model of another depth, is for none of the chosen policies, or
        sets what another one sets too.
    """
    given: Settings = {policy: {} for policy in settings}
    origin: dict[tuple[str, str], Calibration] = {}
    for calibration in calibrations:
        _check_depth(calibration, recorded)
        if not set(calibration.policies) & set(settings):
            raise UsageError(
                f"{calibration.source} is for {', '.join(calibration.policies)}: none of them is "
                "a chosen policy"
            )
        for policy, values in calibration.policies.items():
            for name, text in _as_text(values).items():
                other = origin.setdefault((policy, name), calibration)
                if other is not calibration:
                    raise UsageError(
                        f"{other.source} and {calibration.source} both set {policy}.{name}: "
                        "give one of them"
                    )
                if policy in given:
                    given[policy][name] = text
    return {policy: given[policy] | dict(own) for policy, own in settings.items()}


def _check_depth(calibration: Calibration, recorded: Mapping[str, int]) -> None:
    for trace, layers in recorded.items():
        if layers != calibration.layers:
            raise UsageError(
                f"{calibration.source} was made for {calibration.layers} layers "
                f"({calibration.model}), {trace} was recorded on {layers}: "
                "calibrate on the recorded model"
            )


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path}: no such calibration file; {_MADE_BY}") from None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{path}: cannot be read as UTF-8 text ({why})") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: not TOML ({error})") from None


def _parse(document: Mapping[str, Any], path: Path) -> Calibration:
    """The document as a `Calibration`; whatever is missing or of the wrong type is an error."""
    head = document.get("calibration")
    policies = document.get("policies")
    if not isinstance(head, Mapping) or not isinstance(policies, Mapping):
        raise UsageError(
            f"{path}: not a calibration: [calibration] or [policies.*] is missing; {_MADE_BY}"
        )
    for name, kind in _FIELDS.items():
        value = head.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UsageError(f"{path}: [calibration] {name} must be {kind.__name__}, not {value!r}")
    if head["kind"] not in KINDS:
        raise UsageError(f"{path}: {UnknownName('kind of calibration', head['kind'], KINDS)}")
    if not policies:
        raise UsageError(f"{path}: no policy is calibrated: [policies.NAME] is missing")
    for policy, values in policies.items():
        if not isinstance(values, Mapping) or not values:
            raise UsageError(f"{path}: [policies.{policy}] must hold settings")
        for name, value in values.items():
            if not isinstance(value, bool | int | float | str):
                raise UsageError(f"{path}: {policy}.{name} must be one value, not {value!r:.40}")
    return Calibration(
        **{name: head[name] for name in _FIELDS},
        policies=policies,
        finding=str(head.get("finding", "")),
        protocol=_mapping(head.get("protocol")),
        versions=_mapping(head.get("versions")),
        evidence=_mapping(document.get("evidence")),
        source=str(path),
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _as_text(values: Mapping[str, Any]) -> dict[str, str]:
    """TOML values in the form that ``--set`` has."""
    return {name: str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in values.items()}  # fmt: skip
