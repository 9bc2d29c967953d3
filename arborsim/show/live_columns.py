"""The columns of the tables of live runs, once for the terminal and the HTML page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from arborsim.core.units import Scale, scale_for
from arborsim.show.live_rows import LiveRow


@dataclass(frozen=True)
class LiveColumn:
    """One figure of a `LiveRow`; see `arborsim.show.columns.Column`.

    A column with `text` shows that, and sorts by its value.
    """

    key: str
    head: tuple[str, ...]
    title: str
    kind: str
    family: str
    value: Callable[[LiveRow], float]
    about: str
    text: Callable[[LiveRow], str] | None = None

    def show(self, row: LiveRow, scale: Scale) -> str:
        if self.text is not None:
            return self.text(row)
        return scale.show(self.value(row))


def _interval(row: LiveRow) -> str:
    return f"{100 * row.low:.1f}-{100 * row.high:.1f}" if row.judged else "n/a"


def _correct(row: LiveRow) -> str:
    return f"{row.correct}/{row.judged}" if row.judged else "n/a"


def _difference(row: LiveRow) -> str:
    return "" if math.isnan(row.difference) else f"{100 * row.difference:+.1f}"


def _p(row: LiveRow) -> str:
    if math.isnan(row.p):
        return ""
    return "<0.001" if row.p < 0.001 else f"{row.p:.3f}"


ANSWERS: tuple[LiveColumn, ...] = (
    LiveColumn("correct", ("right",), "Right", "count", "correct", lambda r: r.correct,
               "Problems solved, of those searched: less than all if the budget could not hold "
               "some.", _correct),
    LiveColumn("accuracy", ("accu-", "racy"), "Accuracy", "percent", "accuracy",
               lambda r: r.accuracy, "Share of the searched problems that were solved.",
               lambda r: f"{100 * r.accuracy:.1f}" if r.judged else "n/a"),
    LiveColumn("interval", ("95%", "interval"), "95% interval", "percent", "interval",
               lambda r: r.low, "Clopper-Pearson interval of the accuracy.", _interval),
    LiveColumn("difference", ("vs", "full"), "Accuracy vs full", "points", "difference",
               lambda r: r.difference,
               "Accuracy less that of full retention on the same problems.", _difference),
    LiveColumn("p", ("Fisher", "p"), "Fisher's p", "count", "p", lambda r: r.p,
               "Two-sided p of Fisher's exact test of that difference.", _p),
)  # fmt: skip

MEMORY: tuple[LiveColumn, ...] = (
    LiveColumn("peak_hbm", ("HBM", "peak"), "HBM peak", "bytes", "memory",
               lambda r: r.row.peak_hbm_kv_bytes,
               "Largest KV footprint in device memory of any search, staged tokens included; "
               "weights are not in it. It includes the prefill, so it can exceed the budget."),
    LiveColumn("hbm_vs_full", ("of", "full"), "of full", "percent", "hbm_vs_full",
               lambda r: r.hbm_vs_full,
               "That peak relative to the one of full retention on the same problems."),
    LiveColumn("peak_ddr", ("DDR", "peak"), "DDR peak", "bytes", "memory",
               lambda r: r.row.peak_ddr_bytes, "Largest KV footprint in host memory."),
    LiveColumn("peak_quantised", ("quan-", "tised"), "Quantised peak", "bytes", "memory",
               lambda r: r.row.peak_quantised_bytes,
               "Largest size of what is held in 8 bits, in HBM and DDR together."),
    LiveColumn("allocated", ("allo-", "cated"), "Allocated", "bytes", "memory",
               lambda r: r.allocated_bytes,
               "Largest size of the tensors that hold KV on the device, gaps included."),
    LiveColumn("device", ("all on", "device"), "Device peak", "bytes", "device",
               lambda r: r.device_peak_bytes,
               "Largest memory of the framework's allocator on the device, weights included."),
    LiveColumn("evicted", ("evic-", "ted"), "Evicted", "tokens", "moves",
               lambda r: r.row.evicted_tokens,
               "Tokens whose KV was thrown away, summed over searches; one can count repeatedly."),
    LiveColumn("quantised", ("to 8", "bits"), "Quantised", "tokens", "moves",
               lambda r: r.row.quantised_tokens, "Tokens whose KV was quantised."),
    LiveColumn("offloaded", ("off-", "loaded"), "Offloaded", "tokens", "moves",
               lambda r: r.row.offloaded_tokens, "Tokens whose KV was moved to DDR."),
    LiveColumn("rehydrated", ("rehy-", "drated"), "Rehydra\u00adted", "tokens", "moves",
               lambda r: r.row.rehydrated_tokens,
               "Evicted tokens whose KV was computed again by a prefill pass."),
    LiveColumn("rehydrations", ("pas-", "ses"), "Rehydra\u00adtions", "count", "rehydrations",
               lambda r: r.row.rehydrations, "Prefill passes that brought evicted tokens back."),
    LiveColumn("decisions", ("deci-", "sions"), "Decisions", "count", "decisions",
               lambda r: r.row.decisions, "How often the policy was asked."),
)  # fmt: skip

TIME: tuple[LiveColumn, ...] = (
    LiveColumn("total", ("total", "time"), "Total time", "seconds", "time",
               lambda r: r.total_s, "All searches of the row, one after the other."),
    LiveColumn("prefill", ("pre-", "fill"), "Prefill", "seconds", "time",
               lambda r: r.row.time.prefill_s, "Forward passes over prompts."),
    LiveColumn("model", ("model",), "Model", "seconds", "time",
               lambda r: r.row.time.decode_s, "Forward passes of the generated tokens."),
    LiveColumn("policy_time", ("pol-", "icy"), "Policy", "seconds", "time",
               lambda r: r.row.time.policy_s, "Taking signals, deciding, and moving tokens."),
    LiveColumn("transfer", ("trans-", "fer"), "Exposed transfer", "seconds", "time",
               lambda r: r.row.time.exposed_transfer_s, "Waiting for copies from or to DDR."),
    LiveColumn("rehydration", ("rehy-", "drate"), "Rehydra\u00adtion", "seconds", "time",
               lambda r: r.row.time.rehydration_s, "Prefill passes over evicted tokens."),
    LiveColumn("other", ("other",), "Other", "seconds", "time",
               lambda r: r.other_s, "Sampling, keeping the tree, judging thoughts and answers."),
    LiveColumn("hidden", ("hid-", "den"), "Hidden transfer", "seconds", "time",
               lambda r: r.row.time.hidden_transfer_s,
               "Copies that ran behind computation; not part of the total."),
    LiveColumn("tokens_per_s", ("", "speed"), "Speed", "rate", "rate",
               lambda r: r.tokens_per_s,
               "Generated tokens, on all branches together, per second of total time."),
    LiveColumn("speed_vs_full", ("vs", "full"), "Speed vs full", "factor", "speed_vs_full",
               lambda r: r.speed_vs_full, "Speed relative to full retention, same problems."),
)  # fmt: skip

#: Columns that say nothing where they are zero in every row.
_OPTIONAL = {
    "peak_quantised", "allocated", "device", "quantised", "offloaded", "peak_ddr", "rehydrated",
    "rehydrations", "transfer", "rehydration", "other", "hidden",
}  # fmt: skip


def shown(columns: Sequence[LiveColumn], rows: Sequence[LiveRow]) -> tuple[LiveColumn, ...]:
    """Without columns that say nothing here: nothing judged, compared with, or moved."""
    silent = {
        column.key
        for column in columns
        if column.key in _OPTIONAL and not any(column.value(row) for row in rows)
    }
    if not any(row.judged for row in rows):
        silent |= {column.key for column in ANSWERS}
    for column in columns:
        compares = column.key in ("difference", "p") or column.key.endswith("vs_full")
        if compares and all(math.isnan(column.value(row)) for row in rows):
            silent.add(column.key)
    return tuple(column for column in columns if column.key not in silent)


def scales(columns: Iterable[LiveColumn], rows: Sequence[LiveRow]) -> dict[str, Scale]:
    """Unit of each column, by key; one per family."""
    families: dict[str, list[LiveColumn]] = {}
    for column in columns:
        families.setdefault(column.family, []).append(column)
    found = {}
    for members in families.values():
        values = [column.value(row) for column in members for row in rows]
        scale = scale_for(members[0].kind, values)
        found.update({column.key: scale for column in members})
    return found
