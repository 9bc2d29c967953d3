"""`arborsim live`: policies on a live model, with tokens really removed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from arborsim.core.errors import ArborsimError, UsageError, more_room
from arborsim.products.live.ask import LiveOptions, LiveRun
from arborsim.products.options import ReportOptions, check_files


def live(options: LiveOptions, output: ReportOptions) -> None:
    """Search with a bar on standard error, then show the results."""
    files = {"--out": options.out, "--report": output.report, "--trace": options.trace}
    _run(LiveRun(replace(options, progress=True)), output, check_files(files))


def _run(running: LiveRun, output: ReportOptions, files: dict[str, Path]) -> None:
    """Search with a bar on standard error, then show the results."""
    from arborsim.play.results import BASELINE

    found = running.found

    def show_unfinished() -> None:
        if found.results and not output.json:
            running.results().print(notes=output.notes)

    try:
        running.run()
    except KeyboardInterrupt:
        show_unfinished()
        raise KeyboardInterrupt(f": {running.kept()}") from None
    except ArborsimError:
        show_unfinished()
        raise
    output.print(running.results(), files.values())
    for usage in () if output.json else running.models:
        print(usage.sentence)
    # Full retention, which always runs, does not count where others were asked for.
    asked = [one for one in found.results if one.policy != BASELINE] or found.results
    if all(one.infeasible for one in asked):
        why = asked[0].infeasible
        raise UsageError(f"nothing could run: {why}: {more_room([why])}")
