"""`arborsim live`: policies on a live model, with tokens really removed."""

from __future__ import annotations

from dataclasses import replace

from arborsim.products.live.ask import LiveOptions
from arborsim.products.options import ReportOptions, check_files


def live(options: LiveOptions, output: ReportOptions) -> None:
    """Search with a bar on standard error, then show the results."""
    from arborsim.products.live.run import LiveRun

    files = {"--out": options.out, "--report": output.report, "--trace": options.trace}
    running = LiveRun(replace(options, progress=True))
    running.show(output, check_files(files))
    for usage in () if output.json else running.models:
        print(usage.sentence)
    running.refuse_nothing()
