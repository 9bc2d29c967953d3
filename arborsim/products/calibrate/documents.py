"""The file a calibration is kept in, its figure, and the settings of policies made of it.

Small, readable TOML that says how it was made::

    [calibration]          kind, model, layers, traces, tokens, seed, command, finding
    [calibration.versions] of the software
    [calibration.protocol] what was done, kind by kind
    [policies.NAME]        the settings that `--calibration` gives to the policy NAME
    [evidence...]          what they were derived from
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from arborsim.core.documents import plain, to_toml
from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.installed import revision, versions
from arborsim.core.outputs import write_text
from arborsim.core.records import convert, located, parse_toml, read_text
from arborsim.core.settings import setting_text
from arborsim.policies.registry import build
from arborsim.trace.reader import TraceReader

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Settings = dict[str, dict[str, str]]
#: Colours of a calibration's figure.
MAIN, SECOND, MUTED = "#0b7a75", "#b8432f", "#5b6770"
_MADE_BY = "make one with `arborsim calibrate`"


@dataclass(frozen=True)
class Calibration:
    """Settings of policies that were found on a model."""

    kind: Literal["bands", "msve", "arkv", "tune"]
    model: str  # name of the model it was found on
    layers: int  # of that model
    #: How much it rests on
    traces: int
    tokens: int
    seed: int
    command: str  # that made it
    policies: Mapping[str, Mapping[str, bool | int | float | str]]  # settings for each policy
    finding: str = ""  # the outcome in one sentence
    versions: Mapping[str, str] = field(default_factory=dict)
    protocol: Mapping[str, Any] = field(default_factory=dict)
    evidence: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""  # file it was read from; "" for a new one

    def to_toml(self) -> str:
        """The file's text. The same calibration gives the same bytes."""
        head = plain(self)
        del head["source"]
        policies, evidence = head.pop("policies"), head.pop("evidence")
        return to_toml({"calibration": head, "policies": policies, "evidence": evidence})


def software(*packages: str) -> dict[str, str]:
    """Versions of arborsim and of those of `packages` that are installed, and its revision."""
    return versions(*packages) | ({"revision": at} if (at := revision()) else {})


def recordings(readers: Iterable[TraceReader]) -> dict[str, dict[str, Any]]:
    """Facts about the recordings that a calibration rests on, by file name."""

    def about(reader: TraceReader) -> dict[str, Any]:
        info = reader.info
        found = {"search": info.search, "searches": reader.num_episodes, "seed": info.seed}
        return found | dict(info.search_parameters)

    return {each.path.name: about(each) for each in readers}


def rounded(value: Any, form: str = ".6f") -> Any:
    """With floats as `form` prints them: the last bits depend on the machine and mean nothing."""
    if isinstance(value, float):
        return float(f"{value:{form}}")
    if isinstance(value, Mapping):
        return {key: rounded(item, form) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [rounded(item, form) for item in value]
    return value


def shipped() -> dict[str, Path]:
    """Calibrations that come with arborsim, by name."""
    folder = Path(str(files("arborsim.products.calibrate") / "shipped"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def read_calibration(path: Path | str, *, code: bool = False) -> Calibration:
    """The calibration in the file `path`, or the shipped one of that name.

    With `code`, policies of its own are imported, which it names as ``package.module:Class``.

    Raises `UsageError` if there is no such file, it is no calibration, or it gives a policy what
    the policy does not take.
    """
    path = Path(path)
    if path.suffix != ".toml" and not path.exists():
        try:
            path = shipped()[str(path)]
        except KeyError:
            raise UnknownName("calibration", str(path), shipped()) from None
    if not path.exists():
        raise UsageError(f"{path}: no such calibration file; {_MADE_BY}")
    document = parse_toml(read_text(path), str(path))
    head, policies = document.get("calibration"), document.get("policies")
    with located(str(path)):
        if not isinstance(head, dict) or not isinstance(policies, dict):
            raise UsageError(
                f"not a calibration: [calibration] or [policies.*] is missing; {_MADE_BY}"
            )
        if not policies:
            raise UsageError("no policy is calibrated: [policies.NAME] is missing")
        body = {"policies": policies, "evidence": document.get("evidence", {})}
        found = convert(Calibration, head | body, finite=False)
        for policy, settings in found.policies.items():
            if not settings:
                raise UsageError(f"[policies.{policy}] must hold settings")
            build(policy, _as_text(settings), code=code)
    return replace(found, source=str(path))


def apply(
    settings: Mapping[str, Mapping[str, str]],
    calibrations: Sequence[Calibration],
    recorded: Mapping[str, int],
) -> Settings:
    """Settings of the chosen policies, calibrated: what `registry.build` takes.

    `settings` holds all chosen policies with what the user set, which wins over calibrations.
    `recorded` is the layers of the model that each trace was recorded on, by the trace's name.

    Raises `UsageError` if a calibration was made on a model of another depth, is for none of the
    chosen policies, or sets what another one sets too.
    """
    given: Settings = {policy: {} for policy in settings}
    origin: dict[tuple[str, str], Calibration] = {}
    for calibration in calibrations:
        for trace, layers in recorded.items():
            if layers != calibration.layers:
                raise UsageError(
                    f"{calibration.source} was made for {calibration.layers} layers "
                    f"({calibration.model}), {trace} was recorded on {layers}: "
                    "calibrate on the recorded model"
                )
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


def _as_text(values: Mapping[str, Any]) -> dict[str, str]:
    """TOML values in the form that ``--set`` has."""
    return {name: setting_text(value) for name, value in values.items()}


def interval(low: np.ndarray, value: np.ndarray, high: np.ndarray) -> dict[str, Any]:
    """Plotly's error bars of `value`."""
    return {"symmetric": False, "array": high - value, "arrayminus": value - low}


def figure(title: str, data: list[Any], x: dict[str, Any], y: str = "") -> Figure:
    """A figure in the style of calibrations. `x` is an axis, `y` the title of the other."""
    from plotly.graph_objects import Figure

    return Figure(data).update_layout(
        title={"text": title.replace("; ", "<br>"), "font": {"size": 14}},
        template="plotly_white",
        legend={"orientation": "h", "y": -0.2},
        margin={"t": 60, "r": 20},
        xaxis=x,
        yaxis_title=y,
    )


def write_figure(figure: Figure, path: Path) -> None:
    """Write a page that needs no network. The same figure gives the same bytes.

    Raises `UsageError` if it cannot be written.
    """
    page = figure.to_html(include_plotlyjs=True, full_html=True, div_id="calibration")
    write_text(path, page)
