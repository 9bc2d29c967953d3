"""Policies, budgets and settings that a caller chooses, by name or as objects.

The command line passes texts (``"h2o,snapkv"``, ``"0.25"``, ``"h2o.per=shared"``). Python may also
pass lists, numbers, a dict of settings and policies that it made itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.settings import MOST_COUNT, whole_number
from arborsim.products.declare import AnyPath, Option, listed

if TYPE_CHECKING:
    from arborsim.core.geometry import Geometry
    from arborsim.core.tiers import Budget
    from arborsim.policies.base import Policy

#: Names by comma, classes (``"package.module:Class"``), compositions (``"mine.toml"``), policies.
Policies: TypeAlias = Annotated[
    "str | Policy | Sequence[str | Policy]", Option("policy", many=True, complete="policy")
]
OnePolicy: TypeAlias = Annotated["str | Policy", Option(complete="policy")]
#: Shares of full retention's peak (float in (0, 1]), tokens (int), or texts of the command line.
Budgets: TypeAlias = Annotated[
    "float | int | str | Budget | Sequence[float | int | str | Budget]", Option("budget", many=True)
]
#: By parameter, or by policy and parameter: ``{"sinks": 4, "h2o.per": "shared"}``.
Settings: TypeAlias = Annotated[Mapping[str, Any] | Sequence[str], Option("set")]
Files: TypeAlias = AnyPath | Sequence[AnyPath]
Traces: TypeAlias = Annotated[Files, Option(complete="trace")]


def names(text: str | Sequence[str]) -> list[str]:
    """The names in ``"a, b,c"``, or several of these, each once."""
    whole = text if isinstance(text, str) else ",".join(text)
    return list(dict.fromkeys(name.strip() for name in whole.split(",") if name.strip()))


def whole_numbers(given: str | int | Sequence[int], option: str) -> list[int]:
    """Numbers of 1 or more: ``"16,64"``, 16 or [16, 64]."""
    text = given if isinstance(given, str) else ",".join(map(str, listed(given)))
    try:
        found = [whole_number(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise UsageError(
            f"{option} {text:.40}: expected whole numbers from 1 to {MOST_COUNT:,}, by comma"
        )
    return found


def files(given: Files) -> list[Path]:
    """Paths of files. At least one.

    Raises `UsageError`.
    """
    found = [Path(each) for each in listed(given)]
    if not found:
        raise UsageError("no trace was given: name a file, such as one that arborsim record made")
    return found


def budgets(given: Budgets) -> list[Budget]:
    """The budgets, at least one.

    Raises `UsageError`: one is no share in (0, 1], no number of tokens, or not a number.
    """
    found = [made for each in listed(given) for made in _budgets(each)]
    if not found:
        raise UsageError("--budget names no budget")
    return list(dict.fromkeys(found))


def _budgets(given: Any) -> list[Budget]:
    from arborsim.core.tiers import Budget

    if isinstance(given, Budget):
        return [given]
    if isinstance(given, str):
        return [Budget.parse(text) for text in names(given)]
    if isinstance(given, bool) or not (hasattr(given, "__float__") or hasattr(given, "__index__")):
        raise UsageError(f"budget {given!r} is not a number: give tokens (2048) or a share (0.25)")
    if not hasattr(given, "__index__"):
        return [Budget.parse(f"{float(given):.12g}")]
    text = str(int(given))
    # The text "1" is the whole; the number 1 is a token.
    return [Budget(text, tokens=1) if text == "1" else Budget.parse(text)]


class ChosenPolicies:
    """Policies by name or made already.

    `names` are those looked up by name. `every` says whether all were asked for, so that one that
    cannot run is left out.  `oracle` says whether all include bounds that know the future; if None,
    all but the offline optimum.
    """

    def __init__(self, given: Policies, *, oracle: bool | None = True) -> None:
        from arborsim.play.results import BOUNDS, ORACLE
        from arborsim.policies.registry import available

        self._given: list[str | Policy] = []
        for each in listed(given):
            self._given += names(each) if isinstance(each, str) else [_policy(each)]
        texts = list(dict.fromkeys(each for each in self._given if isinstance(each, str)))
        self.every = "all" in texts
        if self.every:
            without = () if oracle else (ORACLE,) if oracle is None else BOUNDS
            all_of_them = [name for name in available() if name not in without]
            texts = [*all_of_them, *(n for n in texts if n != "all" and n not in available())]
        if not self._given:
            raise UsageError("--policy names no policy")
        self.names = texts

    @property
    def made(self) -> list[Policy]:
        """Those that were given as objects."""
        return [each for each in self._given if not isinstance(each, str)]

    @property
    def all_names(self) -> list[str]:
        """Names of those looked up and those given, in the order in which they run."""
        return [*self.names, *(policy.name for policy in self.made)]

    def build(self, settings: Mapping[str, Mapping[str, str]]) -> list[Policy]:
        """The policies, those given as objects last. Tables go by their names, which must differ.

        `settings` are by policy, as `policy_settings` finds them.
        """
        from arborsim.policies.registry import build

        found = [(name, build(name, dict(settings.get(name, {})))) for name in self.names]
        found += [(type(policy).__name__, policy) for policy in self.made]
        policies: dict[str, Policy] = {}
        for name, made in found:
            if made.name in policies:
                raise UsageError(f"--policy {name}: there is another policy called {made.name}")
            policies[made.name] = made
        return list(policies.values())


def _policy(given: Any) -> Policy:
    from arborsim.policies.base import Policy

    if isinstance(given, Policy):
        return given
    if isinstance(given, type) and issubclass(given, Policy):
        return given()
    raise UsageError(
        f"policy {given!r}: give its name, a Policy, or its class as 'package.module:Class'"
    )


def assigned(setting: str, form: str = "name=value") -> tuple[str, str]:
    """Name and value of a ``--set``, which has that form."""
    name, equals, value = (part.strip() for part in setting.partition("="))
    if not equals or not name:
        raise UsageError(f"--set {setting}: expected {form}")
    return name, value


def policy_settings(chosen: Sequence[str], given: Iterable[str]) -> dict[str, dict[str, str]]:
    """Settings that ``--set`` gives to each of the chosen policies, as `registry.build` takes them.

    ``parameter=value`` is for every chosen policy that has the parameter.  In
    ``policy.parameter=value`` a policy is meant only if one of that name was chosen: parameters of
    composed policies have a dot themselves (``allocate.alpha``).
    """
    from arborsim.policies.registry import available, build, find

    kinds = {name: find(name) for name in chosen}
    values: dict[str, dict[str, str]] = {name: {} for name in chosen}
    for setting in given:
        key, value = assigned(setting, "name=value or policy.name=value")
        meant, parameter = _meant(key, kinds)
        if not meant:
            head = key.partition(".")[0]
            if not chosen or (head in available() and head != key):
                told = f"policy {head} is not among {', '.join(chosen) or 'those given by name'}"
                raise UsageError(f"--set {setting}: {told}")
            build(chosen[0], {key: value})  # raises, naming the nearest parameters
        for name in meant:
            values[name][parameter] = value
    return values


def _meant(key: str, kinds: Mapping[str, type[Policy]]) -> tuple[list[str], str]:
    """The policies that a key of ``--set`` is for, and the parameter."""
    from arborsim.policies.registry import parameter_name

    for name, kind in kinds.items():
        for prefix in (f"{name}.", f"{kind.name}."):
            if key.startswith(prefix):
                return [name], key.removeprefix(prefix)
    return [name for name, kind in kinds.items() if parameter_name(kind, key)], key


def calibrated(
    settings: dict[str, dict[str, str]], calibrations: Iterable[str], traces: Sequence[Path]
) -> dict[str, dict[str, str]]:
    """Settings from calibrations, where none is given."""
    named = [str(each) for each in listed(calibrations)]
    if not named:
        return settings
    from arborsim.products.calibrate.documents import apply, read_calibration
    from arborsim.trace.reader import open_trace

    layers = {str(path): open_trace(path).info.geometry.layers for path in traces}
    return apply(settings, [read_calibration(name) for name in named], layers)


def check_recall(recall: str, known: Sequence[str] = ()) -> None:
    """Refuse an unknown way to read DDR tokens, by default of those that are simulated."""
    from arborsim.core.tiers import RECALLS

    if recall not in (known := known or RECALLS):
        raise UnknownName("recall mode", recall, known)


def geometry(traces: Sequence[Path], model: str, kv_dtype: str, weights: str) -> Geometry | None:
    """The model that is charged. None for the recorded one, as it was recorded."""
    from arborsim.machine.config import with_types
    from arborsim.machine.lookup import load_geometry
    from arborsim.trace.reader import open_trace

    found = load_geometry(model) if model else None
    if found is None and (weights or kv_dtype):
        recorded = list(dict.fromkeys(open_trace(path).info.geometry for path in traces))
        if len(recorded) != 1:
            option = "--weights" if weights else "--kv-dtype"
            raise UsageError(f"{option}: the traces were recorded on several models; give --model")
        found = recorded[0]
    return found and with_types(found, weights, kv_dtype)
