"""`arborsim fidelity`: policies against full retention, token by token."""

from __future__ import annotations

from dataclasses import replace

from arborsim.products.fidelity.ask import FidelityOptions
from arborsim.products.options import ReportOptions, check_files


def fidelity(options: FidelityOptions, output: ReportOptions) -> None:
    """Read with a bar on standard error, then show the results."""
    from arborsim.products.fidelity.run import Reading

    files = check_files({"--out": options.out, "--report": output.report})
    running = Reading(replace(options, progress=True))
    running.show(output, files)
    running.refuse_nothing()
