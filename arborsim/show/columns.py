"""The columns of the comparison table, once for the terminal and the HTML page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from arborsim.core.units import Scale, scale_for
from arborsim.run.aggregate import Row


@dataclass(frozen=True)
class Column:
    """One figure of a `Row`.

    Attributes
    ----------
    key : str
    head : tuple of str
        Lines of a narrow header; the unit is added below.
    title : str
        The header where there is room.
    kind : str
        A key of `arborsim.core.units.UNITS`.
    family : str
        Columns of a family share a unit, so that they can be compared and added.
    value : callable
        Row -> float, in bytes, tokens, seconds or as a ratio.
    about : str
        What it means, for the appendix.
    """

    key: str
    head: tuple[str, ...]
    title: str
    kind: str
    family: str
    value: Callable[[Row], float]
    about: str


MEMORY: tuple[Column, ...] = (
    Column("peak_hbm", ("HBM", "peak"), "HBM peak", "bytes", "memory",
           lambda r: r.peak_hbm_kv_bytes,
           "Largest KV footprint in HBM of any search: whole pages, staging buffers and pages "
           "whose copy to DDR has not finished. Weights are not in it. It is taken before "
           "decisions and includes the prefill, so it can exceed the budget."),
    Column("hbm_vs_full", ("of", "full"), "of full", "percent", "hbm_vs_full",
           lambda r: r.relative.peak_hbm,
           "Peak KV in HBM relative to full retention on the same trace."),
    Column("peak_ddr", ("DDR", "peak"), "DDR peak", "bytes", "memory",
           lambda r: r.peak_ddr_bytes, "Largest KV footprint in host memory of any search."),
    Column("peak_quantised", ("quan-", "tised"), "Quantised peak", "bytes", "memory",
           lambda r: r.peak_quantised_bytes,
           "Largest size of what is held in 8 bits, in HBM and DDR together (part of both peaks)."),
    Column("evicted", ("evic-", "ted"), "Evicted", "tokens", "moves",
           lambda r: r.evicted_tokens,
           "Tokens whose KV was thrown away, summed over searches; a token can count repeatedly."),
    Column("quantised", ("to 8", "bits"), "Quantised", "tokens", "moves",
           lambda r: r.quantised_tokens, "Tokens whose KV was quantised."),
    Column("offloaded", ("off-", "loaded"), "Offloaded", "tokens", "moves",
           lambda r: r.offloaded_tokens, "Tokens whose KV was moved to DDR."),
    Column("rehydrated", ("rehy-", "drated"), "Rehydra\u00adted", "tokens", "moves",
           lambda r: r.rehydrated_tokens,
           "Evicted tokens whose KV was computed again by a prefill pass."),
    Column("moved", ("PCIe", "both"), "Moved over PCIe", "bytes", "traffic",
           lambda r: r.moved_bytes, "Bytes copied between HBM and DDR, both directions."),
)  # fmt: skip

TIME: tuple[Column, ...] = (
    Column("total", ("total", "time"), "Total time", "seconds", "time",
           lambda r: r.time.total_s, "Prefill, decode, rehydration, exposed transfers and policy."),
    Column("time_vs_full", ("vs", "full"), "vs full", "factor", "time_vs_full",
           lambda r: r.relative.time, "Total time relative to full retention on the same trace."),
    Column("model", ("com-", "pute"), "Compute", "seconds", "time",
           lambda r: r.model_s, "Prefill and decode of the model."),
    Column("rehydration", ("rehy-", "drate"), "Rehydra\u00adtion time", "seconds", "time",
           lambda r: r.time.rehydration_s, "Prefill passes over evicted spans."),
    Column("transfer", ("trans-", "fer"), "Exposed transfer", "seconds", "time",
           lambda r: r.time.exposed_transfer_s,
           "What decoding waited for: copies that did not hide behind computation."),
    Column("policy_time", ("pol-", "icy"), "Policy time", "seconds", "time",
           lambda r: r.time.policy_s, "Decisions on the host and scoring on the device."),
    Column("tokens_per_s", ("", "speed"), "Speed", "rate", "rate",
           lambda r: r.tokens_per_s, "Generated tokens per second of total time."),
    Column("speed_vs_full", ("vs", "full"), "speed vs full", "factor", "speed_vs_full",
           lambda r: r.relative.tokens_per_s, "Speed relative to full retention."),
    Column("kept", ("attn.", "kept"), "Attention kept", "percent", "kept",
           lambda r: r.attention_kept,
           "Share of the recorded attention that fell on readable tokens, over generated tokens. "
           "It says how much of what the model looked at was still there; it is not accuracy."),
    Column("gap", ("gap to", "oracle"), "Gap to oracle", "points", "gap",
           lambda r: r.oracle_gap,
           "Attention that the oracle keeps under the same budget, less what the policy keeps, in "
           "percentage points. The oracle knows the future and loses the least that "
           "evicting the same tokens everywhere can; other tiers, recomputing, a choice per head "
           "or holding more than the budget can beat it."),
    Column("error", ("output", "error"), "Output error", "percent", "error",
           lambda r: r.output_error,
           "Relative error of the output of attention on the captured layers, mean over layers and "
           "generated tokens; queries are the recorded ones."),
)  # fmt: skip


REHYDRATIONS = Column(
    "rehydrations", ("rehy-", "drations"), "Rehydrations", "count", "rehydrations",
    lambda r: r.rehydrations, "Prefill passes that brought evicted tokens back.",
)  # fmt: skip


def shown(columns: Sequence[Column], rows: Sequence[Row]) -> tuple[Column, ...]:
    """Without columns that say nothing here: no baseline to compare with, nothing quantised."""
    silent = set()
    if all(math.isnan(r.relative.peak_hbm) and math.isnan(r.relative.time) for r in rows):
        silent |= {column.key for column in columns if column.key.endswith("vs_full")}
    if not any(r.quantised_tokens for r in rows):
        silent |= {"quantised", "peak_quantised"}
    if all(math.isnan(r.output_error) for r in rows):
        silent.add("error")
    if all(math.isnan(r.oracle_gap) for r in rows):
        silent.add("gap")
    return tuple(column for column in columns if column.key not in silent)


def scales(columns: Iterable[Column], rows: Sequence[Row]) -> dict[str, Scale]:
    """Unit of each column, by key; one per family."""
    families: dict[str, list[Column]] = {}
    for column in columns:
        families.setdefault(column.family, []).append(column)
    found = {}
    for members in families.values():
        values = [column.value(row) for column in members for row in rows]
        scale = scale_for(members[0].kind, values)
        found.update({column.key: scale for column in members})
    return found
