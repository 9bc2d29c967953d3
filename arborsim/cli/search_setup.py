"""What `arborsim search` was asked for, checked and turned into a job; and its results as files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from arborsim.bank.arms import REFERENCE, Arm, Sweep, arms_of, chosen_algorithms, split_settings
from arborsim.bank.sweep import OPTION
from arborsim.core.budget import Budget
from arborsim.core.errors import MissingSignal, UnknownName, UsageError
from arborsim.run.episode import Cell
from arborsim.search import search_options

if TYPE_CHECKING:
    from arborsim.bank.job import SearchJob
    from arborsim.bank.results import SearchResult
    from arborsim.core.geometry import Geometry
    from arborsim.machine.profile import HardwareProfile
    from arborsim.policies.base import Policy
    from arborsim.trace.reader import TraceReader

#: The forms of ``--out``, by ending.
FORMS = (".parquet", ".csv", ".json")


def widths_of(text: str) -> list[int]:
    """``"16,64"`` as numbers of 1 or more."""
    from arborsim.cli.options import names

    found = []
    for part in names(text):
        if not part.isdecimal() or int(part) < 1:
            raise UsageError(f"--width {part}: expected whole numbers of 1 or more, by comma")
        found.append(int(part))
    if not found:
        raise UsageError("--width names no width")
    return list(dict.fromkeys(found))


def check_fits(profile: HardwareProfile, geometry: Geometry) -> None:
    """Refuse a model whose weights alone exceed the GPU.

    Raises
    ------
    UsageError
        Says what is there and what is needed.
    """
    if geometry.weight_bytes > profile.usable_hbm_bytes:
        raise UsageError(
            f"--model {geometry.name}: its weights are {geometry.weight_bytes / 1e9:.1f} GB, and "
            f"{profile.name} has {profile.usable_hbm_bytes / 1e9:.1f} GB that can be used: choose "
            "a larger --gpu or a smaller --model"
        )


@dataclass(frozen=True)
class Chosen:
    """Searches and policies with their settings.

    Attributes
    ----------
    arms : tuple of Arm
    policies : tuple of Policy
    optional, optional_policies : bool
        ``all`` searches, or policies, were asked for: one that cannot run is left out.
    left_out : tuple of str
        Why, a line for each.
    """

    arms: tuple[Arm, ...]
    policies: tuple[Policy, ...]
    optional: bool
    optional_policies: bool
    left_out: tuple[str, ...]

    @classmethod
    def of(
        cls,
        algorithms: Sequence[str],
        widths: Sequence[int],
        policies: str,
        given: Iterable[str],
        sweep: str,
    ) -> Chosen:
        """Raises `UnknownName` or `UsageError` for what cannot be meant."""
        from arborsim.cli.options import build_policies, chosen_names, names, policy_settings

        kept = chosen_names(policies)
        chosen = chosen_algorithms(algorithms)
        swept = Sweep.parse(sweep, chosen) if sweep else None
        if swept is not None and swept.option == OPTION and REFERENCE not in chosen:
            chosen = [REFERENCE, *chosen]  # what the values are compared with
        options, rest = split_settings(chosen, given)
        _must_be_known(rest, chosen, kept)
        optional = "all" in algorithms
        arms: list[Arm] = []
        left_out: list[str] = []
        for width in widths:
            for algorithm in chosen:
                try:
                    arms += _arms(algorithm, width, options[algorithm], swept)
                except UsageError as error:
                    if not optional:
                        raise
                    left_out.append(f"left out: {error}")
        built = build_policies(policy_settings(kept, rest))
        by_width = sorted(dict.fromkeys(arms), key=lambda arm: arm.width)
        all_policies = "all" in names(policies)
        return cls(tuple(by_width), tuple(built), optional, all_policies, tuple(left_out))

    def serve(self, bank: Path) -> tuple[list[Arm], list[Policy], list[str]]:
        """The searches and policies that a bank can serve, and why the others are left out.

        Raises
        ------
        MissingSignal
            One was asked for by name, and reads what the bank lacks.
        TraceError
            The trace is no bank.
        """
        from arborsim.bank.job import open_bank, require_embeddings, uses_embeddings
        from arborsim.run.results import LeftOut
        from arborsim.show.left_out import paragraph
        from arborsim.trace.schema import recording_options

        reader = open_bank(bank)
        arms, policies, lacking, unserved = [], [], [], []
        for arm in self.arms:
            try:
                if uses_embeddings(arm):
                    require_embeddings(reader, arm)
                arms.append(arm)
            except MissingSignal as error:
                if not self.optional:
                    raise
                lacking.append(f"left out: {error}")
        for policy in self.policies:
            missing = [signal for signal in sorted(policy.reads()) if not reader.has(signal)]
            if not missing:
                policies.append(policy)
                continue
            if not self.optional_policies:
                reader.require(policy.reads(), f"policy {policy.name}")
            remedy = " ".join(recording_options(missing, reader.info))
            unserved.append(
                LeftOut(bank.name, policy.name, remedy=remedy, unrecorded=reader.info.unrecorded)
            )
        return arms, policies, list(dict.fromkeys((*self.left_out, *lacking, *paragraph(unserved))))


def _arms(algorithm: str, width: int, given: dict[str, str], swept: Sweep | None) -> list[Arm]:
    if swept is None or swept.option not in search_options(algorithm):
        return arms_of(algorithm, [width], given)
    return [
        arm
        for value in swept.values
        for arm in arms_of(
            algorithm, [width], {**given, swept.option: value}, f"{swept.option}={value}"
        )
    ]


def _must_be_known(rest: Iterable[str], algorithms: Sequence[str], policies: Sequence[str]) -> None:
    """Refuse a setting that no chosen search or policy has."""
    from arborsim.policies.registry import available, find, parameters

    known = {name for a in algorithms for name in search_options(a)}
    own = {name for policy in policies for name in parameters(find(policy))}
    for setting in rest:
        key = setting.partition("=")[0]
        head = key.partition(".")[0]
        if key not in own and head not in available() and head not in policies:
            raise UnknownName("setting of the chosen searches and policies", key, known | own)


def cells_of(policies: Sequence[Policy], budgets: Sequence[str]) -> list[Cell]:
    """Budgets x policies; those that ignore budgets are replayed once."""
    from arborsim.run.aggregate import ANY

    if not budgets:
        raise UsageError("--budget names no budget")
    parsed = [Budget.parse(text) for text in budgets]
    always = Budget(ANY, share=1.0)
    found = [Cell(policy, always) for policy in policies if not policy.uses_budget]
    return found + [Cell(p, budget) for budget in parsed for p in policies if p.uses_budget]


def check_out(out: Path | None, bank: Path) -> None:
    """Refuse a file that cannot be written, or that is the bank, before the work is done."""
    from arborsim.cli.options import check_output

    if out is None:
        return
    if out.suffix not in FORMS:
        raise UsageError(f"--out {out}: its name must end in {', '.join(FORMS)}")
    check_output(out, "--out")
    if out.resolve() == bank.resolve():
        raise UsageError(f"--out {out}: that file was given already; choose another name")


def write(results: Sequence[SearchResult], out: Path) -> None:
    """One row per search: the same results give the same bytes."""
    import json

    import pandas as pd

    from arborsim.core.documents import strict

    rows = [result.flat() for result in results]
    if out.suffix == ".json":
        document = strict(rows)
        out.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        return
    frame = pd.DataFrame(rows)
    if rows:
        frame["correct"] = frame["correct"].astype("boolean")
    if out.suffix == ".csv":
        frame.to_csv(out, index=False, lineterminator="\n")
    else:
        frame.to_parquet(out, index=False)


def heading(job: SearchJob, reader: TraceReader, results: Sequence[SearchResult]) -> str:
    """What was run on what, in a line."""
    from arborsim.cli.machine import machine_line

    problems = len({result.episode for result in results})
    return (
        f"{job.trace.name}: {problems} problem{'' if problems == 1 else 's'} of "
        f"{reader.info.task}, simulated on {machine_line(job.machine, [reader.info.geometry])}"
    )
