"""The columns of the table on the page of a search."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from arborsim.bank.results import SearchRow as Row
from arborsim.core.units import Scale, scale_for


@dataclass(frozen=True)
class SearchColumn:
    """One figure of a `Row`; see `arborsim.show.columns.Column`.

    A column with `text` shows that, and sorts by its value.
    """

    key: str
    title: str
    kind: str
    family: str
    value: Callable[[Row], float]
    about: str
    text: Callable[[Row], str] | None = None

    def show(self, row: Row, scale: Scale) -> str:
        return self.text(row) if self.text else scale.show(self.value(row))

    def unit(self, scale: Scale) -> str:
        """For the head of the column."""
        return "" if self.text else f"{scale.unit}{'·s' if self.family == 'byte-s' else ''}"


def figure(name: str) -> Callable[[Row], float]:
    """A figure of a row, by its name in `arborsim.bank.results.FIGURES`."""
    return lambda row: row.figures[name]


def times(name: str) -> Callable[[Row], float]:
    """The same as a multiple of REBASE's."""
    return lambda row: row.times(name)


def _right(row: Row) -> str:
    return f"{row.right}/{row.judged}" if row.judged else "n/a"


def _interval(row: Row) -> str:
    return f"{100 * row.low:.1f}-{100 * row.high:.1f}" if row.judged else "n/a"


_SAME_WIDTH = " As a multiple of REBASE's at the same width, policy and budget."

COLUMNS: tuple[SearchColumn, ...] = (
    SearchColumn("accuracy", "Accuracy", "percent", "accuracy", lambda r: r.accuracy,
                 "Share of right answers among the problems that were judged."),
    SearchColumn("right", "Right", "count", "right", lambda r: r.right,
                 "Problems solved, of those that were judged.", _right),
    SearchColumn("interval", "95% interval", "percent", "interval", lambda r: r.low,
                 "Clopper-Pearson interval of the accuracy, in per cent.", _interval),
    SearchColumn("kv", "KV size", "tokens", "kv", figure("kv_tokens"),
                 "Unique tokens of all unfinished candidates and their ancestors at each "
                 "selection, summed over selections, without the prompt (ETS, figure 3); mean per "
                 "search, as are all figures that follow."),
    SearchColumn("kv_vs", "KV vs REBASE", "factor", "kv_vs", times("kv_tokens"),
                 "The KV size." + _SAME_WIDTH),
    SearchColumn("kv_prompt", "KV with prompt", "tokens", "kv", figure("kv_tokens_with_prompt"),
                 "The KV size with the prompt, counted once per selection."),
    SearchColumn("missed", "Bank misses", "percent", "missed", lambda r: r.missed,
                 "Share of the thoughts asked for that were not recorded. A search that is "
                 "denied thoughts is a smaller one than its width says."),
    SearchColumn("hbm", "HBM peak", "bytes", "memory", figure("peak_hbm_kv_bytes"),
                 "Largest KV footprint in HBM under the policy."),
    SearchColumn("hbm_vs", "HBM peak vs REBASE", "factor", "hbm_vs", times("peak_hbm_kv_bytes"),
                 "The HBM peak." + _SAME_WIDTH),
    SearchColumn("ddr", "DDR peak", "bytes", "memory", figure("peak_ddr_bytes"),
                 "Largest KV footprint in host memory."),
    SearchColumn("held", "Held peak", "bytes", "memory", figure("peak_held_kv_bytes"),
                 "Largest KV size of what the search has not given up, whatever the policy keeps."),
    SearchColumn("hbm_s", "HBM byte-seconds", "bytes", "byte-s", figure("hbm_kv_byte_s"),
                 "Integral over time of the KV bytes in HBM."),
    SearchColumn("calls", "Model calls", "count", "calls", figure("model_calls"),
                 "Thoughts opened: each is one request to the model."),
    SearchColumn("tokens", "Tokens", "tokens", "tokens", figure("generated_tokens"),
                 "Generated tokens."),
    SearchColumn("time", "Time", "seconds", "time", figure("total_s"),
                 "Simulated seconds per search, alone on the GPU."),
    SearchColumn("time_vs", "Time vs REBASE", "factor", "time_vs", times("total_s"),
                 "The time." + _SAME_WIDTH),
    SearchColumn("speed", "Speed", "rate", "rate", figure("tokens_per_s"),
                 "Generated tokens per simulated second, over all searches."),
    SearchColumn("kept", "Attention kept", "percent", "kept", figure("attention_kept"),
                 "Share of the recorded attention that fell on readable tokens."),
)  # fmt: skip


def shown(rows: Sequence[Row]) -> tuple[SearchColumn, ...]:
    """Without columns that say nothing here: unknown in every row, or no DDR used."""
    return tuple(
        column
        for column in COLUMNS
        if column.key == "right" or not all(_silent(column, row) for row in rows)
    )


def _silent(column: SearchColumn, row: Row) -> bool:
    value = column.value(row)
    return math.isnan(value) or (column.key == "ddr" and not value)


def scales(columns: Sequence[SearchColumn], rows: Sequence[Row]) -> dict[str, Scale]:
    """Unit of each column, by key; one per family."""
    families: dict[str, list[SearchColumn]] = {}
    for column in columns:
        families.setdefault(column.family, []).append(column)
    found = {}
    for members in families.values():
        values = [column.value(row) for column in members for row in rows]
        scale = scale_for(members[0].kind, values)
        if members[0].key == "calls":
            scale = Scale("", 1.0, 1)  # means
        found.update({column.key: scale for column in members})
    return found
