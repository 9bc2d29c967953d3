"""The searches and policies that run, of those that `arborsim.search` was asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

from arborsim.core.errors import MissingSignal, UnknownName, UsageError
from arborsim.machine.machine import Machine
from arborsim.play import served
from arborsim.play.results import LeftOut
from arborsim.policies.base import Policy
from arborsim.policies.registry import available, find, parameter_name, parameters
from arborsim.products.replay.words import left_out
from arborsim.products.search.results import OPTION
from arborsim.products.search.run import require_embeddings
from arborsim.searches import search_options
from arborsim.searches.arms import (
    REFERENCE,
    Arm,
    Sweep,
    arms_of,
    chosen_algorithms,
    split_settings,
)
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import recording_options


def chosen_arms(
    algorithms: Sequence[str], widths: Sequence[int], sweep: str, given: Iterable[str]
) -> tuple[list[Arm], list[str], list[str]]:
    """The searches, the settings that are left for policies, and what is left out and why."""
    chosen = chosen_algorithms(algorithms)
    swept = Sweep.parse(sweep, chosen) if sweep else None
    if swept is not None and swept.option == OPTION and REFERENCE not in chosen:
        chosen = [REFERENCE, *chosen]  # what the values are compared with
    options, rest = split_settings(chosen, given)
    found: list[Arm] = []
    left_out: list[str] = []
    for width, algorithm in product(widths, chosen):
        try:
            found += _arms(algorithm, width, options[algorithm], swept)
        except UsageError as error:
            if "all" not in algorithms:
                raise
            left_out.append(f"left out: {error}")
    return sorted(dict.fromkeys(found), key=lambda arm: arm.width), rest, left_out


def _arms(algorithm: str, width: int, given: dict[str, str], swept: Sweep | None) -> list[Arm]:
    """A search at one width, once for each value of a sweep of one of its options."""
    if swept is None or swept.option not in search_options(algorithm):
        return arms_of(algorithm, [width], given)
    option, found = swept.option, []
    for value in swept.values:
        found += arms_of(algorithm, [width], {**given, option: value}, f"{option}={value}")
    return found


def must_be_known(rest: Iterable[str], algorithms: Sequence[str], policies: Sequence[str]) -> None:
    """Refuse a setting that no chosen search or policy has."""
    known = {name for a in algorithms for name in search_options(a)}
    kinds = [find(policy) for policy in policies]
    own = {name for kind in kinds for name in parameters(kind)}
    for setting in rest:
        key = setting.partition("=")[0]
        head = key.partition(".")[0]
        has = any(parameter_name(kind, key) for kind in kinds)
        if not has and head not in available() and head not in policies:
            raise UnknownName("setting of the chosen searches and policies", key, known | own)


def check_fits(machine: Machine) -> None:
    """Refuse a model whose weights alone exceed the GPU."""
    geometry, profile = machine.geometry, machine.profile
    if geometry is not None and geometry.weight_bytes > profile.usable_hbm_bytes:
        raise UsageError(
            f"--model {geometry.name}: its weights are {geometry.weight_bytes / 1e9:.1f} GB, and "
            f"{profile.name} has {profile.usable_hbm_bytes / 1e9:.1f} GB that can be used: choose "
            "a larger --gpu or a smaller --model"
        )


def served_arms(
    reader: TraceReader, arms: Sequence[Arm], *, optional: bool
) -> tuple[list[Arm], list[str]]:
    """The searches that the bank can serve, and why the others are left out if optional."""
    kept, errors = [], []
    for arm in arms:
        try:
            require_embeddings(reader, arm)
            kept.append(arm)
        except MissingSignal as error:
            errors.append(error)
    if errors and not (optional and kept):
        raise errors[0]
    return kept, [f"left out: {error}" for error in errors]


def served_policies(
    reader: TraceReader, policies: Sequence[Policy], *, optional: bool
) -> tuple[list[Policy], list[str]]:
    """The policies that the bank can serve, and why the others are left out if optional."""
    kept = [each for each in policies if not served.missing(each, reader)]
    unserved = [each for each in policies if served.missing(each, reader)]
    if unserved and not (optional and kept):
        served.require(unserved[0], reader)
    name, info = reader.path.name, reader.info
    return kept, left_out(
        LeftOut(
            name,
            each.name,
            remedy=" ".join(recording_options(served.missing(each, reader), info)),
            unrecorded=info.unrecorded,
        )
        for each in unserved
    )
