"""Right answers counted in logs of live runs, by policy and budget."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arborsim.core.errors import UsageError
from arborsim.play.backends import LiveResult
from arborsim.play.live_log import LiveRecords, request_of
from arborsim.play.results import ANY, BASELINE
from arborsim.products.replay.answers import Answers, Counted, Searched, shipped


def known_answers(logs: Iterable[Path]) -> Answers:
    """The answers counted in `logs`, then those that come with the package."""
    counted = (row for path in logs for row in counted_in(path))
    return Answers((*counted, *shipped().rows))


@dataclass(frozen=True)
class Judged:
    """One search of a live run. `correct` is None if it was not judged."""

    episode: int
    policy: str
    budget: str
    correct: bool | None
    infeasible: bool
    tokens: int = 0
    full_tokens: int = 0


def read_log(path: Path) -> tuple[dict[str, Any], list[Judged]]:
    """Head and results of a log of ``arborsim live --out``.

    Raises `UsageError`: it is no such log, or of a shadow run, in which all answers are those of
    full retention.
    """
    log: LiveRecords[LiveResult] = LiveRecords(path)
    try:
        head = log.read()
        request = request_of(head, path)
    except UsageError as error:
        raise UsageError(f"--answers: {error}") from None
    if request.get("shadow"):
        raise UsageError(
            f"--answers: {path}: nothing was removed in a shadow run, so it does not say what a "
            "policy does to answers; run arborsim live without --shadow"
        )
    found = [
        Judged(r.episode, r.policy, ANY if r.budget in ("", "-") else r.budget, r.correct,
               bool(r.infeasible), r.tokens, r.full_tokens)
        for r in log.records
    ]  # fmt: skip
    return head, found


def counted_in(path: Path) -> Iterator[Counted]:
    """Answers that a log of ``arborsim live --out`` counts. `UsageError` as of `read_log`."""
    head, results = read_log(path)
    request, facts = head.get("request", {}), head.get("facts", {})
    searched = Searched.of_request(request, str(facts.get("task", "")), str(facts.get("model", "")))
    settings = {(c["policy"], c["budget"]): c["settings"] for c in request.get("cells", ())}
    yield from count(searched, results, settings, str(path))


def count(
    searched: Searched,
    results: Iterable[Judged],
    settings: Mapping[tuple[str, str], Mapping[str, Any]],
    source: str,
) -> Iterator[Counted]:
    """Rows of one run over the same problems, by policy and budget.

    `settings` are those of each policy and budget.  Policies of which nothing was judged, and no
    budget was too small, have no row.
    """
    cells: dict[tuple[str, str], list[Judged]] = {}
    for each in results:
        cells.setdefault((each.policy, each.budget), []).append(each)
    full = {
        each.episode: each.correct
        for (policy, _), own in cells.items()
        for each in own
        if policy == BASELINE and each.correct is not None
    }
    for (policy, budget), own in cells.items():
        judged = {each.episode: each.correct for each in own if each.correct is not None}
        infeasible = sum(each.infeasible for each in own)
        if not judged and not infeasible:
            continue
        both = all(episode in full for episode in judged)
        yield Counted(
            sum(map(bool, judged.values())), len(judged), infeasible,
            sum(bool(full[episode]) for episode in judged) if both else None, source,
            searched=searched, policy=policy, budget=budget,
            settings=dict(settings.get((policy, budget), {})),
        )  # fmt: skip
