"""`arborsim validate published` and `policies`: play what others measured on GPUs, and compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from arborsim.core.errors import UsageError
from arborsim.products.declare import Option, Options, Positive, Written
from arborsim.products.options import Expert, check_files, command_line
from arborsim.report.progress import PatientProgress

if TYPE_CHECKING:
    from arborsim.products.validate.comparison_log import ComparisonLog
    from arborsim.products.validate.published_report import Published
    from arborsim.report.report import Report

Run = TypeVar("Run")
Played = TypeVar("Played")


@dataclass(frozen=True, kw_only=True)
class ComparisonOutput(Options, panel="Output"):
    """Files to write.

    Parameters
    ----------
    out
        Write every run to this CSV or Parquet file.
    report
        Write a self-contained HTML page.
    resume
        Go on where --out was interrupted.
    """

    out: Written | None = None
    report: Written | None = None
    resume: bool = False

    def check(self, **others: Path | None) -> None:
        """Refuse files that cannot be written, the `others` by their options included."""
        from arborsim.products.validate.published_report import check_format

        files = {"--out": self.out, "--report": self.report}
        check_files(files | {f"--{name}": path for name, path in others.items()})
        if self.out is not None:
            check_format(self.out)
        elif self.resume:
            raise UsageError("--resume needs --out, the table to go on with")


def published(
    output: ComparisonOutput,
    file: Annotated[Path | None, Option(shown="those shipped")] = None,
    *,
    fidelity: Annotated[Written | None, Expert, Option(panel="Output")] = None,
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
    fidelity
        Write errors by kind of run, as `plan` quotes them, to this TOML file.
    aiconfigurator
        Also ask AIConfigurator, where it is installed.
    jobs
        Processes that share the runs; same results.
    """
    from arborsim.products.validate import serving
    from arborsim.products.validate.aiconfigurator import installed
    from arborsim.products.validate.published import KeptRun, compare, compare_asking
    from arborsim.products.validate.published_report import Published, report_of, write_frame

    output.check(fidelity=fidelity)
    runs, other = serving.read_runs(file), installed() if aiconfigurator else ""
    log = _log(output, KeptRun, runs, other)
    played = _compared(compare_asking if other else compare, runs, jobs, log, lambda r: r.model)
    about = _sources(file, serving.SOURCE, AIConfigurator=other or "not asked")
    result = Published(played, about)
    if output.out is not None:
        write_frame(result, output.out)
    if fidelity is not None:
        _write_fidelity(result, fidelity)
    _shown(report_of(result), output, log)


def policies(
    output: ComparisonOutput,
    file: Annotated[Path | None, Option(shown="those shipped")] = None,
    *,
    jobs: Annotated[Positive, Option(panel="Run")] = 1,
) -> None:
    """Play policies that others measured on engines next to full retention, and compare.

    Both arms of a row are played on the server that `plan` uses, in the row's setting: model, GPU,
    engine and its features, load, memory for the cache. Shows whether the policy is faster or
    slower as measured, errors of the ratio of both throughputs, and requests in flight, on rows
    that no constant was fitted on. With --out every row is kept as soon as it was played, with all
    its columns: Ctrl-C loses one, --resume goes on.

    Parameters
    ----------
    file
        CSV file of measured rows.
    jobs
        Processes that share the rows; same results.
    """
    from arborsim.products.validate.policies import KeptPolicy, compare
    from arborsim.products.validate.policies_report import (
        MeasuredPolicies,
        report_of,
        write_frame,
    )
    from arborsim.products.validate.policy_runs import SOURCE, read_policy_runs

    output.check()
    runs = read_policy_runs(file)
    log = _log(output, KeptPolicy, runs, "")
    played = _compared(compare, runs, jobs, log, lambda run: run.policy)
    result = MeasuredPolicies(played, _sources(file, SOURCE))
    if output.out is not None:
        write_frame(result, output.out)
    _shown(report_of(result), output, log)


def _log(
    output: ComparisonOutput, kind: type[Any], runs: Sequence[Any], other: str
) -> ComparisonLog[Any] | None:
    """The log next to the table that is to be written; None without one."""
    from arborsim.products.validate.comparison_log import ComparisonLog

    if output.out is None:
        return None
    return ComparisonLog(output.out, kind, runs, other, resume=output.resume)


def _compared(
    compare: Callable[[Run], Played],
    runs: Sequence[Run],
    jobs: int,
    log: ComparisonLog[Any] | None,
    name: Callable[[Run], str],
) -> tuple[Played, ...]:
    """Every run, played; what is new is in the log before the next one."""
    from arborsim.core.workers import in_order

    found: list[Played] = [] if log is None else log.played
    rest = runs[len(found) :]
    try:
        with PatientProgress(len(rest)) as progress:
            for run, each in zip(rest, in_order(compare, rest, jobs), strict=True):
                progress.advance(name(run), 1)
                if log is not None:
                    log.keep(len(found), each)
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


def _shown(report: Report, output: ComparisonOutput, log: ComparisonLog[Any] | None) -> None:
    """Write the page, drop the log that is needed no more, and print."""
    from arborsim.report.report import write
    from arborsim.report.text import print_report

    if output.report is not None:
        write(report, output.report)
    if log is not None:
        log.path.unlink()
    print_report(report)


def _sources(file: Path | None, shipped: str, **others: str) -> dict[str, str]:
    """The sources of the numbers."""
    from arborsim.core import __version__

    return {
        "runs": str(file) if file else shipped,
        "arborsim": __version__,
        **others,
        "date": datetime.now(UTC).date().isoformat(),
        "command": command_line(),
    }


def _write_fidelity(result: Published, path: Path) -> None:
    from arborsim.core.documents import to_toml
    from arborsim.core.outputs import write_text
    from arborsim.machine.fidelity import FidelityFile
    from arborsim.products.validate.published_errors import by_kind, near, overall

    about, runs = result.about, near(result.runs)
    summary = FidelityFile(
        about["date"], about["arborsim"], about["runs"], *overall(runs), by_kind(runs)
    )
    write_text(path, to_toml(summary))
