"""`arborsim validate`: compare simulated and live searches in bytes, decisions and seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from arborsim.core.errors import UsageError
from arborsim.products.choices import Budgets, Policies, check_recall
from arborsim.products.declare import Option, Options, Positive, Written
from arborsim.products.options import Expert, PolicyOptions, check_files, command_line
from arborsim.products.record.problems import ProblemOptions, SamplingOptions, live_fields
from arborsim.report.progress import LiveBar, PatientProgress

if TYPE_CHECKING:
    from arborsim.play.backends import LiveFacts, LiveRequest
    from arborsim.products.validate.published import PlayedRun
    from arborsim.products.validate.published_log import PublishedLog
    from arborsim.products.validate.published_report import Published
    from arborsim.products.validate.results import CellCheck
    from arborsim.products.validate.serving import ServingRun

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

    `arborsim validate published` compares with runs of serving engines that others measured.
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


@dataclass(frozen=True, kw_only=True)
class PublishedOutput(Options, panel="Output"):
    """Files to write.

    Parameters
    ----------
    out
        Write every run to this CSV or Parquet file.
    report
        Write a self-contained HTML page.
    fidelity
        Write errors by kind of run, as `plan` quotes them, to this TOML file.
    resume
        Go on where --out was interrupted.
    """

    out: Written | None = None
    report: Written | None = None
    fidelity: Annotated[Written | None, Expert] = None
    resume: bool = False

    def check(self) -> None:
        from arborsim.products.validate.published_report import check_format

        files = ("out", "report", "fidelity")
        check_files({f"--{name}": getattr(self, name) for name in files})
        if self.out is not None:
            check_format(self.out)
        elif self.resume:
            raise UsageError("--resume needs --out, the table to go on with")


def published(
    output: PublishedOutput,
    file: Annotated[Path | None, Option(shown="those shipped")] = None,
    *,
    aiconfigurator: bool = True,
    jobs: Annotated[Positive, Option(panel="Run")] = 1,
) -> None:
    """Play serving runs that others measured on GPUs, and compare.

    Each run is played on the server that `plan` uses: a closed loop of clients, ten requests each.
    Shows errors of the time per output token, the time to first token and the output tokens per
    second, on runs that no constant was fitted on, with the worst and odd runs by name. With --out
    every run is kept as soon as it was played: Ctrl-C loses one, --resume goes on.

    Parameters
    ----------
    file
        CSV file of measured runs.
    aiconfigurator
        Also ask AIConfigurator, where it is installed.
    jobs
        Processes that share the runs; same results.
    """
    from arborsim.products.validate.aiconfigurator import installed
    from arborsim.products.validate.published_report import Published, print_published
    from arborsim.products.validate.serving import read_runs

    output.check()
    runs, other = read_runs(file), installed() if aiconfigurator else ""
    log = None
    if output.out is not None:
        from arborsim.products.validate.published_log import PublishedLog

        log = PublishedLog(output.out, runs, other, resume=output.resume)
    result = Published(_compared(runs, jobs, bool(other), log), _sources(file, other))
    _write(result, output)
    if log is not None:
        log.path.unlink()
    print_published(result)


#: Commands by their name after `validate`.
SUBCOMMANDS = {"published": published}


def _compared(
    runs: list[ServingRun], jobs: int, ask: bool, log: PublishedLog | None
) -> tuple[PlayedRun, ...]:
    """Every run, played; what is new is in the log before the next one."""
    from arborsim.core.workers import in_order
    from arborsim.products.validate.published import compare, compare_asking
    from arborsim.products.validate.published_log import Kept

    found = [] if log is None else log.played
    rest = runs[len(found) :]
    try:
        with PatientProgress(len(rest)) as progress:
            for each in in_order(compare_asking if ask else compare, rest, jobs):
                progress.advance(each.run.model, 1)
                if log is not None:
                    log.add(Kept.of(len(found), each))
                found.append(each)
    except KeyboardInterrupt:
        left = "; nothing was written (--out keeps what is done)"
        if log is not None:
            left = f": {log.path} holds {len(found)} of {len(runs)} runs; --resume goes on"
        raise KeyboardInterrupt(left) from None
    finally:
        if log is not None:
            log.close()
    return tuple(found)


def _sources(file: Path | None, other: str) -> dict[str, str]:
    """The sources of the numbers."""
    from arborsim.core import __version__
    from arborsim.products.validate import serving

    return {
        "runs": str(file) if file else serving.SOURCE,
        "arborsim": __version__,
        "AIConfigurator": other or "not asked",
        "date": datetime.now(UTC).date().isoformat(),
        "command": command_line(),
    }


def _write(result: Published, output: PublishedOutput) -> None:
    """The files that were asked for."""
    from arborsim.core.outputs import write_text
    from arborsim.machine.fidelity import FidelityFile
    from arborsim.products.validate.published_errors import by_kind, near, overall
    from arborsim.products.validate.published_report import write_frame

    if output.out is not None:
        write_frame(result, output.out)
    if output.report is not None:
        from arborsim.products.validate.published_report import write_page

        write_page(result, output.report)
    if output.fidelity is not None:
        about = result.about
        summary = FidelityFile(
            about["date"], about["arborsim"], about["runs"], *overall(near(result.runs)),
            by_kind(near(result.runs)),
        )  # fmt: skip
        write_text(output.fidelity, summary.to_text())


class Keeper:
    """A `ValidationObserver` that writes results into a folder as they come.

    Raises `UsageError` if there are results and neither option was given, or they are of another
    request.
    """

    def __init__(self, request: LiveRequest, output: ValidateOutput) -> None:
        from arborsim.play.live_log import describe
        from arborsim.products.validate.results import Validation, read_results

        self.path, self._request = output.out / RESULTS, request
        self._described = {k: v for k, v in describe(request).items() if k != "episodes"}
        self.result = Validation(())
        self.bar = LiveBar("loading the model", time_left=True)
        if not self.path.exists() or output.overwrite:
            return
        if not output.resume:
            raise UsageError(f"{self.path} exists: --resume goes on, --overwrite replaces it")
        self.result, there = read_results(self.path)
        for key in sorted({*there, *self._described}):
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
        from arborsim.products.validate.results import merged, write_results

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
        from arborsim.products.validate.report import print_validation, write_page

        page = keeper.path.with_name(PAGE)
        print_validation(keeper.result)
        write_page(keeper.result, page)
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
