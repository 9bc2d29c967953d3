"""`arborsim validate`: compare simulated and live searches in bytes, decisions and seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from arborsim.core.errors import UsageError
from arborsim.products.choices import Budgets, Policies, check_recall
from arborsim.products.declare import Option, Options, Positive
from arborsim.products.options import PolicyOptions, command_line
from arborsim.products.record.problems import ProblemOptions, SamplingOptions, live_fields
from arborsim.products.validate.measured import policies, published
from arborsim.report.progress import LiveBar

if TYPE_CHECKING:
    from arborsim.play.backends import LiveFacts, LiveRequest
    from arborsim.products.validate.results import CellCheck

RESULTS, PAGE = "results.parquet", "index.html"


@dataclass(frozen=True, kw_only=True)
class ValidateOptions(PolicyOptions, ProblemOptions, SamplingOptions):
    """Problems that are searched live and simulated, and the policies.

    Parameters
    ----------
    episodes
        How many problems; accuracies can be ranked from 40 on.
    """

    policies: Policies = "all"
    budgets: Budgets = "0.5,0.7"
    episodes: Annotated[Positive, Option(panel="Problems and model")] = 4


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(Options, panel="Machine"):
    """The device, and how its memory is used.

    Parameters
    ----------
    gpu
        Profile of the device that runs it: a TOML file of calibrate hardware, or a name.
    recall
        How DDR tokens are read: stage, stream or near.
    overlap
        Copy behind the computation; bytes at a moment then depend on how fast copies are.
    """

    gpu: Annotated[str, Option(complete="gpu")]
    recall: str = "stage"
    overlap: bool = False


@dataclass(frozen=True, kw_only=True)
class ValidateOutput(Options, panel="Output"):
    """The results and their page.

    Parameters
    ----------
    out
        Folder for results.parquet and index.html.
    resume
        Go on with the results in the folder.
    overwrite
        Replace the results in the folder.
    """

    out: Path = Path("validation")
    resume: bool = False
    overwrite: bool = False


def validate(options: ValidateOptions, device: DeviceOptions, output: ValidateOutput) -> None:
    """Search live and simulated side by side, and say how far apart they are.

    For every policy, budget and problem: does a replay decide as the recorded run did; are the
    simulated bytes those of the live pools; how far off are the seconds; how do decisions drift
    once eviction is real; does the replay rank policies as live accuracy does.  Results are kept
    problem by problem: Ctrl-C loses one at most, --resume goes on.

    `arborsim validate published` compares with runs of serving engines that others measured, and
    `arborsim validate policies` with policies on them.
    """
    from arborsim.machine.lookup import load_profile
    from arborsim.machine.machine import Machine
    from arborsim.play.backends import LiveRequest

    check_recall(device.recall, ("stage", "stream", "near"))
    if output.out.exists() and not output.out.is_dir():
        raise UsageError(f"--out {output.out}: expected a folder, but that is a file")
    if output.resume and output.overwrite:
        raise UsageError("--resume keeps the results and --overwrite replaces them: give one")
    request = LiveRequest(
        **live_fields(options),
        recall=device.recall,
        overlap=device.overlap,
        machine=Machine(load_profile(device.gpu), None, device.recall),
        command=command_line(),
    )
    _run(request, Keeper(request, output))


#: Commands by their name after `validate`.
SUBCOMMANDS = {"published": published, "policies": policies}


class Keeper:
    """A `ValidationObserver` that writes results into a folder as they come.

    Raises `UsageError` if there are results and neither option was given, or they are of another
    request.
    """

    def __init__(self, request: LiveRequest, output: ValidateOutput) -> None:
        from arborsim.play.live_log import completed, describe
        from arborsim.products.validate.files import read_results
        from arborsim.products.validate.results import Validation

        self.path, self._request = output.out / RESULTS, request
        self._described = {k: v for k, v in describe(request).items() if k != "episodes"}
        self.result = Validation(())
        self.bar = LiveBar("loading the model", time_left=True)
        if not self.path.exists() or output.overwrite:
            return
        if not output.resume:
            raise UsageError(f"{self.path} exists: --resume goes on, --overwrite replaces it")
        self.result, there = read_results(self.path)
        there = completed(there)
        for key in sorted({*there, *self._described} - {"episodes"}):
            if there.get(key) != self._described.get(key):
                raise UsageError(
                    f"{self.path} holds results of another request (its {key} differs): choose "
                    "another --out, or --overwrite"
                )

    @property
    def problems(self) -> set[int]:
        """Those that are done."""
        return {check.episode for check in self.result.checks}

    def began(self, facts: LiveFacts, episodes: int) -> None:
        old = self.result.about
        about = _about(self._request, facts, old.get("date", ""))
        compared = {key: about[key] for key in ("model", "device", "dtype")}
        known = dict(each.rpartition(" ")[::2] for each in old.get("versions", "").split(", "))
        for name, version in facts.software.items():  # earlier versions named less of it
            compared |= {name: version} if name in known else {}
        for key, now in compared.items() if old else ():
            before = known[key] if key in known else old[key]
            if before != now:
                raise UsageError(
                    f"{self.path} holds results of another {key} ({before}, now {now}): choose "
                    "another --out, or --overwrite"
                )
        self.result = replace(self.result, about=about, left_out=())
        self.bar.show(total=episodes, completed=len(self.problems))

    def wants(self, episode: int) -> bool:
        return episode not in self.problems

    def running(self, episode: int, what: str, tokens: int) -> None:
        self.bar.show(f"problem {episode}, {what}")

    def checked(self, checks: tuple[CellCheck, ...]) -> None:
        from arborsim.products.validate.files import merged, write_results

        self.result = replace(self.result, checks=merged(self.result.checks, checks))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out {self.path.parent}: {error.strerror}") from error
        write_results(self.result, self._described, self.path)
        self.bar.show(completed=len(self.problems))


def _run(request: LiveRequest, keeper: Keeper) -> None:
    """Compare, then show and write the results."""
    from arborsim.play.backends import get_backend

    stopped = False
    try:
        with keeper.bar:
            get_backend("torch").validate(request, keeper)
    except KeyboardInterrupt:
        stopped = True
    if keeper.result.checks:
        from arborsim.products.validate.report import report_of
        from arborsim.report.report import write
        from arborsim.report.text import print_report

        page, report = keeper.path.with_name(PAGE), report_of(keeper.result)
        print_report(report)
        write(report, page)
        print(f"wrote {keeper.path} and {page}")
    if not stopped:
        return
    done = f"{keeper.path} holds {len(keeper.problems)} problems; --resume goes on"
    nothing = "no problem was complete, so nothing was written"
    raise KeyboardInterrupt(f": {done if keeper.result.checks else nothing}")


def _about(request: LiveRequest, facts: LiveFacts, before: str) -> dict[str, str]:
    """The sources of the numbers; `before` are the dates of an earlier run."""
    assert request.machine is not None
    profile = request.machine.profile
    today = datetime.now(UTC).date().isoformat()
    options = {**request.search_options, **request.task_options}
    return {
        "model": facts.model + (" (random weights)" if facts.random_weights else ""),
        "task": " ".join([facts.task, *(f"{key} {value}" for key, value in options.items())]),
        "search": f"{request.search}, temperature {request.temperature:g}, seed {request.seed}",
        "device": facts.device,
        "dtype": facts.dtype,
        "GPU profile": profile.name,
        "assumed in the profile": ", ".join(profile.assumed()) or "nothing",
        "recall of DDR tokens": request.recall + ("" if request.overlap else ", without overlap"),
        "KV bytes per token": f"{facts.kv_bytes_per_token:,}",
        "versions": facts.about,
        "command": request.command,
        "date": ", ".join(dict.fromkeys(filter(None, [before, today]))),
    }
