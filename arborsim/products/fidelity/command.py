"""`arborsim fidelity`: policies against full retention, token by token."""

from __future__ import annotations

from dataclasses import replace

from arborsim.core.errors import ArborsimError, UsageError, more_room
from arborsim.play.results import BASELINE
from arborsim.products.fidelity.ask import FidelityOptions, Reading
from arborsim.products.options import ReportOptions, check_files


def fidelity(options: FidelityOptions, output: ReportOptions) -> None:
    """Read with a bar on standard error, then show the results."""
    files = check_files({"--out": options.out, "--report": output.report})
    running = Reading(replace(options, progress=True))
    found = running.found
    try:
        running.run()
    except (KeyboardInterrupt, ArborsimError) as ended:
        if found.results and not output.json:
            running.results().print(notes=output.notes)
        if isinstance(ended, ArborsimError):
            raise
        raise KeyboardInterrupt(f": {running.kept()}") from None
    output.print(running.results(), files.values())
    asked = [one for one in found.results if one.policy != BASELINE] or found.results
    if all(one.infeasible for one in asked):
        why = asked[0].infeasible
        raise UsageError(f"nothing could run: {why}: {more_room([why])}")
