"""`arborsim tune`: settings of a policy that no others beat in memory, time and quality."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from arborsim.core.errors import UsageError
from arborsim.products.options import OutputOptions, interruptible
from arborsim.products.tune.ask import TuneOptions


@dataclass(frozen=True, kw_only=True)
class TuneOutput(OutputOptions, panel="Output"):
    """Files to write.

    Parameters
    ----------
    out
        Write all trials: .parquet, .csv or .json.
    front
        Folder to write a policy file (or calibration) into for each of the front.
    report
        Write the page of a replay of the front on the held-out episodes.
    """

    front: Path | None = None

    @property
    def files(self) -> dict[str, Path]:
        return {option: path for option, path in super().files.items() if option != "--front"}

    def check(self) -> None:
        if self.front is not None and self.front.exists() and not self.front.is_dir():
            raise UsageError(f"--front {self.front} is a file: name a folder")
        super().check()


def tune(options: TuneOptions, output: TuneOutput) -> None:
    """Tune, then write and print what was asked for."""
    output.check()
    left = "; trials that had ended are in the study, and the same command goes on"
    with interruptible(left):
        found = replace(options, progress=True).results()
    if output.out is not None:
        found.save(output.out)
    files = found.front(output.front) if output.front is not None else []
    if output.report is not None:
        found.report(output.report)
    if output.json:
        print(found.to_json())
        return
    found.print()
    for path in (*filter(None, (output.out, output.report)), *files):
        print(f"wrote {path}")
