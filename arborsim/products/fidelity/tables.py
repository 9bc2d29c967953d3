"""Fidelity: a row per policy and budget over all documents, its intervals, and its table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from arborsim.core import documents
from arborsim.core.errors import more_room
from arborsim.core.statistics import LEVEL, RESAMPLES
from arborsim.play.backends import LiveFacts
from arborsim.play.fidelity import PARTS, FidelityResult
from arborsim.play.results import ANY, BASELINE, MARK
from arborsim.policies.registry import titled
from arborsim.products.live.results import not_bounded
from arborsim.products.replay.words import budget_of_reading
from arborsim.report.table import read_columns
from arborsim.report.words import counted, hundredths, interval, nats

if TYPE_CHECKING:
    import pandas as pd


ROUNDING = 1e-6  #: nats: below, a divergence is that of two ways to compute the same


@dataclass(frozen=True)
class FidelityReport:
    """All results of a run, and what they rest on."""

    facts: LiveFacts
    results: tuple[FidelityResult, ...]
    request: dict[str, Any]  #: see `arborsim.play.live_log.describe`
    command: str

    @property
    def masked(self) -> bool:
        return bool(self.request.get("masked"))

    def label(self, policy: str) -> str:
        """The policy with the settings that are not its authors': ``"h2o per=shared"``."""
        cells = [cell for cell in self.request["cells"] if cell["policy"] == policy]
        return titled(policy, cells[0]["settings"] if cells else {})


@dataclass(frozen=True)
class Estimate:
    """A figure with the ends of its 95% interval, which are NaN where there is none."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def above(self, other: Estimate) -> bool:
        """Whether the whole interval lies above the other one."""
        return self.low > other.high


@dataclass(frozen=True)
class FidelityRow:
    """One policy under one budget, over the documents that its budget could hold."""

    policy: str
    label: str  #: with settings, and `MARK` if it does not keep to the budget
    budget: str
    bounded: bool
    documents: int
    tokens: int  #: judged
    kl: Estimate  #: nats
    kl_tail: float
    agreement: Estimate
    perplexity: float
    full_perplexity: float
    ratio: Estimate  #: of perplexities, to full retention's
    peak_kv_bytes: int
    kl_parts: tuple[Estimate, ...]  #: by part of the document
    agreement_parts: tuple[Estimate, ...]
    infeasible: tuple[str, ...]  #: why, of each document that the budget could not hold

    @property
    def is_baseline(self) -> bool:
        return self.policy == BASELINE

    @property
    def budget_label(self) -> str:
        return "-" if self.budget == ANY else self.budget

    @property
    def name(self) -> str:
        """For sentences and legends."""
        return self.label if self.budget == ANY else f"{self.label} at {self.budget}"


def rows_of(report: FidelityReport) -> tuple[FidelityRow, ...]:
    """In the order of the results."""
    cells: dict[tuple[str, str], list[FidelityResult]] = {}
    for result in report.results:
        cells.setdefault((result.policy, result.budget), []).append(result)
    unbounded, _ = not_bounded(report.request["cells"])
    seed = int(report.request.get("seed", 0))
    rows = (_row(report, own, cell[0] not in unbounded, seed) for cell, own in cells.items())
    return tuple(row for row in rows if row is not None)


def _row(
    report: FidelityReport, cell: Sequence[FidelityResult], bounded: bool, seed: int
) -> FidelityRow | None:
    own = [result for result in cell if not result.infeasible]
    if not own:
        return None
    first, policy = own[0], own[0].policy
    n = np.array([result.counts for result in own], dtype=np.float64)  # [documents, parts]
    weights = _resampled(len(own), seed)

    def drawn(sums: np.ndarray, of: np.ndarray) -> np.ndarray:
        """Ratios of the sums of documents' figures, of all and of every resample."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray((weights @ sums) / (weights @ of))

    total = n.sum(1)
    kl, nll, full_nll = (
        np.array([getattr(result, name) for result in own]) * n
        for name in ("kl", "nll", "full_nll")
    )
    agree = np.array([result.agree for result in own], dtype=np.float64)
    lost, base = drawn(nll.sum(1), total), drawn(full_nll.sum(1), total)
    tails = np.array([result.kl_tail for result in own])
    label = report.label(policy)
    return FidelityRow(
        policy=policy,
        label=label if bounded or first.budget == ANY else f"{label}{MARK}",
        budget=first.budget,
        bounded=bounded,
        documents=len(own),
        tokens=int(total.sum()),
        kl=_estimate(drawn(kl.sum(1), total)),
        kl_tail=float((tails * total).sum() / total.sum()),
        agreement=_estimate(drawn(agree.sum(1), total)),
        perplexity=math.exp(lost[0]),
        full_perplexity=math.exp(base[0]),
        ratio=_estimate(np.exp(lost - base)),
        peak_kv_bytes=max(result.peak_kv_bytes for result in own),
        kl_parts=tuple(map(_estimate, drawn(kl, n).T)),
        agreement_parts=tuple(map(_estimate, drawn(agree, n).T)),
        infeasible=tuple(result.infeasible for result in cell if result.infeasible),
    )


def _resampled(size: int, seed: int) -> np.ndarray:
    """How often each document is drawn, ``[1 + resamples, documents]``: first each once."""
    if size < 2:  # nothing varies
        return np.ones((1, size))
    drawn = np.random.default_rng(seed).integers(0, size, (RESAMPLES, size))
    counts = np.apply_along_axis(np.bincount, 1, drawn, minlength=size)
    return np.concatenate([np.ones((1, size)), counts])


def _estimate(values: np.ndarray) -> Estimate:
    """From the figure of all documents, followed by those of resamples."""
    if len(values) == 1 or np.isnan(values[1:]).all():
        return Estimate(float(values[0]))
    tail = (1 - LEVEL) / 2
    low, high = np.nanquantile(values[1:], [tail, 1 - tail])
    return Estimate(float(values[0]), float(low), float(high))


def _ends(each: Estimate, show: Callable[[float], str]) -> str:
    return "n/a" if math.isnan(each.low) else f"{show(each.low)}-{show(each.high)}"


def _times(value: float) -> str:
    return f"{value:.3f}" if value < 100 else f"{value:,.0f}"


_FUNCTIONS: dict[str, Callable[[FidelityRow], Any]] = {
    "kl_text": lambda row: nats(row.kl.value),
    "kl_interval": lambda row: _ends(row.kl, nats),
    "tail_text": lambda row: nats(row.kl_tail),
    "agreement_text": lambda row: hundredths(row.agreement.value),
    "agreement_interval": lambda row: interval(row.agreement.low, row.agreement.high),
    "ratio_text": lambda row: _times(row.ratio.value),
    "ratio_interval": lambda row: _ends(row.ratio, _times),
    "perplexity_text": lambda row: f"{row.perplexity:,.3g}",
}
#: Columns by group: ``columns.toml`` declares them.
NAMES, FIGURES = read_columns("arborsim.products.fidelity", _FUNCTIONS).values()
#: Figures that a terminal shows at once, and what of them goes first where there is no room.
DECIDING = ("kl", "kl_interval", "agreement", "agreement_interval", "ratio", "peak")
IMPLIED = ("agreement_interval",)


def scope(rows: Iterable[FidelityRow]) -> str:
    """``"6,136 judged tokens of 8 documents"``: what the fullest of the rows rests on."""
    most = max(rows, key=lambda row: row.tokens)
    return f"{counted(most.tokens, 'judged token')} of {counted(most.documents, 'document')}"


def closest(rows: Sequence[FidelityRow]) -> FidelityRow | None:
    """The row whose KL is visibly the least, of rows at one budget that keep to it.

    None where intervals overlap, or there is a single document or policy.
    """
    able = sorted((row for row in rows if row.bounded), key=lambda row: row.kl.value)
    apart = len(able) > 1 and all(row.kl.above(able[0].kl) for row in able[1:])
    return able[0] if apart and able[1].kl.low > ROUNDING else None


def cautions(report: FidelityReport, rows: Sequence[FidelityRow]) -> list[str]:
    """Notes without which the numbers can be misread."""
    found = []
    if report.facts.random_weights:
        found.append("Random weights: distributions mean nothing.")
    if report.masked:
        found.append("Evicted tokens were masked, which decides and reads the same; no bytes.")
    if any(row.documents < 2 for row in rows):
        found.append("One document has no interval: give a longer --text, or more --documents.")
    if any(row.label.endswith(MARK) for row in rows):
        found.append(f"{MARK} does not keep to the budget, so it is compared with no other.")
    found += budget_of_reading(not_bounded(report.request["cells"])[1])
    return found + left_out(report)


def left_out(report: FidelityReport) -> list[str]:
    """Documents that a budget could not hold, and why."""
    cells: dict[tuple[str, str], list[str]] = {}
    for each in report.results:
        if each.infeasible:
            cells.setdefault((each.policy, each.budget), []).append(each.infeasible)
    found = [
        f"{policy} at budget {budget} could not hold {counted(len(why), 'document')}, e.g. "
        f"{why[0].removeprefix(f'budget infeasible for {policy}: ')}."
        for (policy, budget), why in cells.items()
    ]
    if cells:
        todo = more_room([why for reasons in cells.values() for why in reasons])
        found.append(f"{todo[0].upper()}{todo[1:]}.")
    return found


def row_record(row: FidelityRow) -> dict[str, Any]:
    """A row as a flat record: an interval is ``NAME_low`` and ``NAME_high``."""
    found: dict[str, Any] = {}
    for name, value in asdict(row).items():
        if name.endswith("_parts"):
            found |= {f"{name[:-6]}_part_{i}": each["value"] for i, each in enumerate(value, 1)}
        elif isinstance(value, dict):
            ends = {f"{name}_{end}": value[end] for end in ("low", "high")}
            found |= {name: value["value"], **ends}
        else:
            found[name] = value
    return found


def sample_record() -> dict[str, Any]:
    """A record like those of rows, for the types of its values."""
    none, parts = Estimate(0.0), (Estimate(0.0),) * PARTS
    return row_record(
        FidelityRow("", "", "", True, 0, 0, none, 0.0, none, 0.0, 0.0, none, 0, parts, parts, ())
    )


_PARTED = ("counts", "agree", "kl", "nll", "full_nll")


def flat(result: FidelityResult) -> dict[str, Any]:
    """One document under one cell as a flat record, its parts by number."""
    found = {name: value for name, value in vars(result).items() if name not in _PARTED}
    for name in _PARTED:
        values = getattr(result, name) or [0] * PARTS
        found |= {f"{name}_{number}": value for number, value in enumerate(values, 1)}
    return found


def unflat(row: dict[str, Any]) -> FidelityResult:
    """The record that `flat` made a row of."""
    found = {each.name: row[each.name] for each in fields(FidelityResult) if each.name in row}
    if not row["infeasible"]:
        for name in _PARTED:
            found[name] = tuple(row[f"{name}_{number}"] for number in range(1, PARTS + 1))
    return FidelityResult(**found)


def fidelity_frame(report: FidelityReport) -> pd.DataFrame:
    """One row per document, policy and budget."""
    import pandas as pd

    return pd.DataFrame([flat(result) for result in report.results])


def fidelity_json(report: FidelityReport) -> str:
    """Facts, request, rows and documents as strict JSON (unknown numbers are null)."""
    rows = rows_of(report)
    found = {name: getattr(report, name) for name in ("facts", "request", "command")}
    found |= {"rows": [*map(row_record, rows)], "results": [*map(flat, report.results)]}
    return documents.to_json({**found, "notes": cautions(report, rows)})
