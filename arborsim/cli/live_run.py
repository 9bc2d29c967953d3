"""Run a live request with a bar, then show what came of it, or of the part that was finished."""

from __future__ import annotations

from pathlib import Path

import typer

from arborsim.cli.live_bar import BarWatch, kept
from arborsim.cli.reward_options import describe_usage
from arborsim.core.errors import ArborsimError, UsageError
from arborsim.live.backends import get_backend
from arborsim.live.log import LiveLog
from arborsim.live.request import LiveRequest
from arborsim.run.aggregate import BASELINE
from arborsim.show.live_export import live_json, make_report
from arborsim.show.live_table import print_live


def run(
    request: LiveRequest,
    out: Path | None,
    page: Path | None,
    *,
    resume: bool,
    overwrite: bool,
    json: bool,
) -> int:
    """Search with a bar on standard error, then show what came of it; returns the exit code."""
    log = LiveLog(out, request, resume=resume, overwrite=overwrite) if out else None
    watch = BarWatch(log, len(request.cells), request.trace)

    def show_unfinished() -> None:
        if watch.facts is not None and watch.results and not json:
            print_live(make_report(request, watch.facts, watch.results))

    try:
        with watch:
            beside = get_backend("torch").live(request, watch)
    except KeyboardInterrupt:
        show_unfinished()
        typer.echo(f"arborsim: interrupted: {kept(watch, out)}", err=True)
        return 130
    except ArborsimError:
        show_unfinished()
        raise
    finally:
        if log is not None:
            log.close()
    assert watch.facts is not None, "the backend has begun"
    result = make_report(request, watch.facts, watch.results)
    if page is not None:
        from arborsim.show.live_page import write_live_page

        write_live_page(result, page)
    if json:
        typer.echo(live_json(result))
    else:
        print_live(result)
        for path in (request.trace, out, page):
            if path is not None:
                typer.echo(f"wrote {path}")
        for usage in beside:
            typer.echo(describe_usage(usage))
    _refuse_if_nothing_ran(watch)
    return 0


def _refuse_if_nothing_ran(watch: BarWatch) -> None:
    """Full retention, which always runs, does not count where others were asked for."""
    results = watch.results
    asked = [result for result in results if result.policy != BASELINE] or list(results)
    if all(result.infeasible for result in asked):
        raise UsageError(f"nothing could run: {asked[0].infeasible}: give a larger --budget")
