"""The figures by which a replay compares policies, for the terminal and for the page."""

from __future__ import annotations

from arborsim.run.results import Row
from arborsim.show.table import LABEL, NOTHING, UNKNOWN, Column, name_column

NAMES: tuple[Column[Row], ...] = (
    name_column("Policy", lambda r: r.label),
    Column("budget", "Budget", LABEL, text=lambda r: r.budget_label, head=("bud-", "get")),
)
MEMORY: tuple[Column[Row], ...] = (
    Column("peak_hbm", "HBM peak", "bytes", lambda r: r.peak_hbm_kv_bytes,
           "Largest KV footprint in HBM of any search: whole pages, staging buffers and pages "
           "whose copy to DDR has not finished. Weights are not in it. It is taken before "
           "decisions and includes the prefill, so it can exceed the budget.",
           ("HBM", "peak"), "memory"),
    Column("hbm_vs_full", "HBM peak, of full", "percent", lambda r: r.relative.peak_hbm,
           "Peak KV in HBM relative to full retention on the same trace.",
           ("of", "full"), hide=UNKNOWN, bar=True),
    Column("peak_ddr", "DDR peak", "bytes", lambda r: r.peak_ddr_bytes,
           "Largest KV footprint in host memory of any search.", ("DDR", "peak"), "memory"),
    Column("peak_quantised", "Quantised peak", "bytes", lambda r: r.peak_quantised_bytes,
           "Largest size of what is held in 8 bits, in HBM and DDR together (part of both peaks).",
           ("quan-", "tised"), "memory", hide=NOTHING),
    Column("evicted", "Evicted", "tokens", lambda r: r.evicted_tokens,
           "Tokens whose KV was thrown away, summed over searches; a token can count repeatedly.",
           ("evic-", "ted"), "moves"),
    Column("quantised", "Quantised", "tokens", lambda r: r.quantised_tokens,
           "Tokens whose KV was quantised.", ("to 8", "bits"), "moves", hide=NOTHING),
    Column("offloaded", "Offloaded", "tokens", lambda r: r.offloaded_tokens,
           "Tokens whose KV was moved to DDR.", ("off-", "loaded"), "moves"),
    Column("rehydrated", "Rehydra\u00adted", "tokens", lambda r: r.rehydrated_tokens,
           "Evicted tokens whose KV was computed again by a prefill pass.",
           ("rehy-", "drated"), "moves"),
    Column("moved", "Moved over PCIe", "bytes", lambda r: r.moved_bytes,
           "Bytes copied between HBM and DDR, both directions.", ("PCIe", "both")),
)  # fmt: skip
TIME: tuple[Column[Row], ...] = (
    Column("total", "Total time", "seconds", lambda r: r.time.total_s,
           "Prefill, decode, rehydration, exposed transfers and policy.",
           ("total", "time"), "time"),
    Column("time_vs_full", "Time vs full", "factor", lambda r: r.relative.time,
           "Total time relative to full retention on the same trace.", ("vs", "full"),
           hide=UNKNOWN),
    Column("model", "Compute", "seconds", lambda r: r.model_s, "Prefill and decode of the model.",
           ("com-", "pute"), "time"),
    Column("rehydration", "Rehydra\u00adtion time", "seconds", lambda r: r.time.rehydration_s,
           "Prefill passes over evicted spans.", ("rehy-", "drate"), "time"),
    Column("transfer", "Exposed transfer", "seconds", lambda r: r.time.exposed_transfer_s,
           "What decoding waited for: copies that did not hide behind computation.",
           ("trans-", "fer"), "time"),
    Column("policy_time", "Policy time", "seconds", lambda r: r.time.policy_s,
           "Decisions on the host and scoring on the device.", ("pol-", "icy"), "time"),
    Column("tokens_per_s", "Speed", "rate", lambda r: r.tokens_per_s,
           "Generated tokens per second of total time.", ("", "speed")),
    Column("speed_vs_full", "Speed vs full", "factor", lambda r: r.relative.tokens_per_s,
           "Speed relative to full retention.", ("vs", "full"), hide=UNKNOWN),
    Column("kept", "Attention kept", "percent", lambda r: r.attention_kept,
           "Share of the recorded attention that fell on readable tokens, over generated tokens. "
           "It says how much of what the model looked at was still there; it is not accuracy.",
           ("attn.", "kept"), bar=True),
    Column("gap", "Gap to oracle", "points", lambda r: r.oracle_gap,
           "Attention that the oracle keeps under the same budget, less what the policy keeps, in "
           "percentage points. The oracle knows the future and loses the least that evicting the "
           "same tokens everywhere can; other tiers, recomputing, a choice per head or holding "
           "more than the budget can beat it.",
           ("gap to", "oracle"), hide=UNKNOWN),
    Column("error", "Output error", "percent", lambda r: r.output_error,
           "Relative error of the output of attention on the captured layers, mean over layers and "
           "generated tokens; queries are the recorded ones.",
           ("output", "error"), hide=UNKNOWN),
)  # fmt: skip
REHYDRATIONS: Column[Row] = Column(
    "rehydrations", "Rehydra\u00adtions", "count", lambda r: r.rehydrations,
    "Prefill passes that brought evicted tokens back.", ("rehy-", "drations"),
)  # fmt: skip
COLUMNS = {column.key: column for column in (*MEMORY, *TIME, REHYDRATIONS)}
