"""`arborsim replay`: its columns, its tables in a terminal, and its results as JSON and data frame.

Few settings are shown in a table per trace, many in a matrix: a line per policy.  Both have the
figures that decide; wide terminals, and ``--view table``, have all.  The budgets of a matrix stand
side by side where the terminal is wide enough for all of them; otherwise each has a block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from arborsim.core import documents
from arborsim.core.measurements import Measurements, Stored, stored_columns
from arborsim.core.tables import with_left_out
from arborsim.core.tiers import BELOW_DDR
from arborsim.core.units import Scale
from arborsim.play.results import ANY, MACHINE, EpisodeResult, ReplayResult, Row, oracles
from arborsim.products.replay import answers_words
from arborsim.products.replay.words import left_out, notes, too_small
from arborsim.report.table import (
    LABEL,
    NOTHING,
    UNKNOWN,
    Column,
    Table,
    name_column,
    print_heading,
    print_tables,
    scales,
    shown,
    terminal,
)
from arborsim.report.words import counted, interval, plain

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console


def _stored(
    memory: str, key: str, title: str, kind: str, value: Callable[[Stored], float], about: str,
    together: str = "",
) -> Column[Row]:  # fmt: skip
    """A column of a memory below DDR; gone where nothing is put there."""
    return Column(
        f"{memory.lower()}_{key}", f"{memory} {title}", kind,
        lambda row: value(row.stored.get(memory, Stored())), about,
        (memory, title.split()[-1]), together, hide=NOTHING,
    )  # fmt: skip


NAMES: tuple[Column[Row], ...] = (
    name_column("Policy", lambda r: r.label),
    Column("budget", "Budget", LABEL, text=lambda r: r.budget_label, head=("budget",)),
)
#: Blank where nothing was counted.
ANSWERS: tuple[Column[Row], ...] = (
    Column("right", "Right answers", "count",
           lambda r: math.nan if r.answers is None else r.answers.accuracy,
           "Problems solved, of those searched, in live runs in which the policy removed tokens, "
           "on the recorded model. @ gives the budget where that of the row was not counted; "
           f"{answers_words.OTHER} marks other problems of the task.",
           ("right",), text=answers_words.short, hide=UNKNOWN),
    Column("right_interval", "95% interval", "percent",
           lambda r: math.nan if r.answers is None else r.answers.low,
           "Clopper-Pearson interval of the share of right answers.", ("95%", "interval"),
           text=lambda r: interval(r.answers.low, r.answers.high) if r.answers else "",
           hide=UNKNOWN),
    Column("right_vs_full", "Right vs full", "points",
           lambda r: math.nan if r.answers is None else r.answers.difference,
           "Share of right answers less that of full retention on the same problems; "
           "in brackets where it is not visible (Fisher's exact test, p of 0.05 or more).",
           ("vs", "full"), text=answers_words.difference, hide=UNKNOWN),
)  # fmt: skip
#: After the names, in a comparison at equal memory.
EQUAL: tuple[Column[Row], ...] = (
    Column("found", "Budget found", LABEL, text=lambda r: r.equal.found if r.equal else "",
           about="The budget at which the policy takes the memory that was asked for.",
           head=("found",)),
    Column("off", "Memory off by", "percent", lambda r: r.equal.off if r.equal else math.nan,
           "How far the policy's memory at that budget is from what was asked for.", ("off", "by"),
           text=lambda r: f"{100 * r.equal.off + 0.0:+.1f}" if r.equal else ""),
)  # fmt: skip
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
           "Largest size of what is held quantised, in HBM and DDR together (part of both peaks).",
           ("quant.", "peak"), "memory", hide=NOTHING),
    Column("evicted", "Evicted", "tokens", lambda r: r.evicted_tokens,
           "Tokens whose KV was thrown away, summed over searches; a token can count repeatedly.",
           ("evicted",), "moves"),
    Column("quantised", "Quantised", "tokens", lambda r: r.quantised_tokens,
           "Tokens whose KV was quantised.", ("to fewer", "bits"), "moves", hide=NOTHING),
    Column("offloaded", "Offloaded", "tokens", lambda r: r.offloaded_tokens,
           "Tokens whose KV was moved to DDR.", ("moved", "to DDR"), "moves"),
    Column("rehydrated", "Rehydra\u00adted", "tokens", lambda r: r.rehydrated_tokens,
           "Evicted tokens whose KV was computed again by a prefill pass.",
           ("computed", "again"), "moves"),
    Column("moved", "Moved over PCIe", "bytes", lambda r: r.moved_bytes,
           "Bytes copied between HBM and DDR, both directions.", ("over", "PCIe")),
    Column("read", "KV read per token", "bytes", lambda r: r.read_bytes_per_token,
           "Keys and values that attention read for a generated token, mean. Shown where a policy "
           "chooses what is read.", ("read", "/tok"), hide=UNKNOWN),
)  # fmt: skip
STORED: tuple[Column[Row], ...] = tuple(
    column
    for memory in BELOW_DDR
    for column in (
        _stored(memory, "peak", "peak", "bytes", lambda each: each.peak_bytes,
                f"Largest KV footprint in {memory} of any search.", "memory"),
        _stored(memory, "moved", "moved", "bytes", lambda each: each.to_bytes + each.from_bytes,
                f"Bytes that crossed the link of {memory}, both directions."),
        _stored(memory, "link", "link busy", "seconds", lambda each: each.link_s,
                f"Seconds in which the link of {memory} carried something, hidden or not.", "time"),
    )
)  # fmt: skip
TIME: tuple[Column[Row], ...] = (
    Column("total", "Total time", "seconds", lambda r: r.time.total_s,
           "Prefill, decode, rehydration, exposed transfers and policy.",
           ("total", "time"), "time"),
    Column("time_vs_full", "Time vs full", "factor", lambda r: r.relative.time,
           "Total time relative to full retention on the same trace.", ("vs", "full"),
           hide=UNKNOWN),
    Column("model", "Compute", "seconds", lambda r: r.model_s, "Prefill and decode of the model.",
           ("compute",), "time"),
    Column("rehydration", "Rehydra\u00adtion time", "seconds", lambda r: r.time.rehydration_s,
           "Prefill passes over evicted spans.", ("prefill", "again"), "time"),
    Column("transfer", "Exposed transfer", "seconds", lambda r: r.time.exposed_transfer_s,
           "What decoding waited for: copies that did not hide behind computation.",
           ("copy", "waits"), "time"),
    Column("policy_time", "Policy time", "seconds", lambda r: r.time.policy_s,
           "Decisions on the host and scoring on the device.", ("policy",), "time"),
    Column("tokens_per_s", "Speed", "rate", lambda r: r.tokens_per_s,
           "Generated tokens per second of total time.", ("speed",)),
    Column("speed_vs_full", "Speed vs full", "factor", lambda r: r.relative.tokens_per_s,
           "Speed relative to full retention.", ("vs", "full"), hide=UNKNOWN),
    Column("kept", "Attention kept", "percent", lambda r: r.attention_kept,
           "Share of the recorded attention that fell on readable tokens, over generated tokens. "
           "It says how much of what the model looked at was still there; it is not accuracy.",
           ("attn.", "kept"), bar=True, words=lambda r: r.kept_note),
    Column("gap", "Gap to oracle", "points", lambda r: r.oracle_gap,
           "Attention that the oracle keeps under the same budget, less what the policy keeps, in "
           "percentage points. The oracle knows the future and loses the least that evicting can: "
           "the same tokens everywhere, or those of each layer or head on its own where the policy "
           "chooses so. Other tiers, recomputing or holding more than the budget can beat it.",
           ("gap to", "oracle"), hide=UNKNOWN),
    Column("error", "Output error", "percent", lambda r: r.output_error,
           "Relative error of the output of attention on the captured layers, mean over layers and "
           "generated tokens; queries are the recorded ones.",
           ("output", "error"), hide=UNKNOWN),
)  # fmt: skip
COLUMNS: dict[str, Column[Row]] = {
    "rehydrations": Column(
        "rehydrations", "Rehydra\u00adtions", "count", lambda r: r.rehydrations,
        "Prefill passes that brought evicted tokens back.", ("prefills", "again")),
    **{column.key: column for column in (*ANSWERS, *MEMORY, *STORED, *TIME)},
}  # fmt: skip


def memory(rows: Sequence[Row]) -> tuple[Column[Row], ...]:
    """`MEMORY`; what is read only where a policy chooses that."""
    chosen = any(row.bounds_read_bytes for row in rows)
    return tuple(c for c in (*MEMORY, *STORED) if chosen or c.key != "read")


#: On pages only: terminals have no room.
PAGE_MEMORY: tuple[Column[Row], ...] = (
    Column("peak_after", "HBM peak once decided", "bytes",
           lambda r: r.peak_after_first_decision_bytes,
           "Largest KV footprint in HBM of any search after its first decision that moved or "
           "destroyed something; the HBM peak if there was none."),
    Column("hbm_byte_seconds", "HBM x time", "byte-seconds", lambda r: r.hbm_byte_seconds,
           "KV footprint in HBM times seconds, summed over searches: what a search keeps from "
           "others.", ("HBM", "byte-s")),
)  # fmt: skip
#: The figures that decide: one table of 80 columns.
_DECIDING = (
    "right", "right_interval", "peak_hbm", "hbm_vs_full", "peak_ddr", "moved",
    *(column.key for column in STORED), "total",
    "time_vs_full", "kept", "gap", "error",
)  # fmt: skip
_MORE = "More figures (moves, parts of the time): --view table, --out or --report."
VIEWS = ("auto", "table", "matrix")
#: From this width on, `auto` shows all figures, and they stand in one table.
WIDE = 140
#: With more rows per trace than this, `auto` shows the matrix.
_MOST_ROWS = 16
#: Columns that others imply: the first to go where there is no room.
_IMPLIED = ("speed_vs_full", "tokens_per_s", "model", "hbm_vs_full", "quantised")
#: Narrow headers, in the order of what decides.
_HEADS = {
    "right": "right", "kept": "kept", "gap": "gap", "error": "err", "peak_hbm": "HBM",
    "hbm_vs_full": "full", "peak_ddr": "DDR", "peak_quantised": "quant", "total": "time",
    "time_vs_full": "full", "rehydrations": "rehy",
}  # fmt: skip
_ABOVE = {"hbm_vs_full": "of", "time_vs_full": "vs"}
#: What follows from its neighbours and full retention: the first to go.
_RELATIVE = ("time_vs_full", "hbm_vs_full")
_LONGEST_NAME = 20
_BETWEEN_BUDGETS = " │ "


def print_replay(result: ReplayResult, console: Console | None = None, view: str = "auto") -> None:
    """Print the comparison, one block per trace, at the width of the terminal.

    `view` ``"table"`` has all figures: below `WIDE` columns two tables per trace (memory and moves;
    time and quality), which fit 80 columns, above it one.  ``"matrix"`` has a line per policy and
    the figures that decide.  ``"auto"`` takes the matrix where there is much to compare, all
    figures from `WIDE` columns on, and otherwise a table of those that decide.
    """
    console = console or terminal()
    rows = result.rows()
    traces = _by_trace(result)
    if view == "auto":
        many = max(map(len, traces.values()), default=0) > _MOST_ROWS
        view = "matrix" if many else "table" if console.width >= WIDE else "short"
    if MACHINE in result.settings:
        console.print(plain(result.settings[MACHINE]), markup=False)
    for own in traces.values():
        first = next(row for row in own if not row.left_out)
        print_heading(
            console, first.trace, f"{counted(first.searches, 'search')}, {first.prompt_tokens:,} "
            f"prompt + {first.generated_tokens:,} generated tokens",
        )  # fmt: skip
        if view == "matrix":
            for line in matrix(own, console.width):
                console.print(line, markup=False, no_wrap=True, crop=False)
        else:
            implied = (
                ("right_interval", "off", "moved", "total", *_IMPLIED)
                if view == "short"
                else _IMPLIED
            )
            print_tables(console, _groups(own, view, console.width), implied=implied)
    if rows:
        found = notes(result, rows)
        for note in [*found, _MORE] if view == "short" else found:
            console.print(plain(note), style="dim", markup=False)
    else:
        console.print("Nothing was replayed.")
    ran = ([row for row in own if not row.left_out] for own in traces.values())
    wanted = [answers_words.would_decide(own, result) for own in ran]
    for line in (*result.does_not_fit, *left_out(result.left_out), *filter(None, wanted)):
        console.print(plain(line), markup=False)


def leading(rows: Sequence[Row]) -> tuple[Column[Row], ...]:
    """The columns that say what a row is."""
    return (*NAMES, *EQUAL) if any(row.equal for row in rows) else NAMES


def short_tables(result: ReplayResult) -> Iterator[tuple[str, Table[Row]]]:
    """Of each trace, its name and the table of the figures that decide."""
    for trace, rows in _by_trace(result).items():
        for _, table in _groups(rows, "short", WIDE):
            yield trace, table


def _by_trace(result: ReplayResult) -> dict[str, list[Row]]:
    """Rows of traces on which something ran, those of budgets that are too small among them."""
    ran = {episode.trace for episode in result.episodes}
    found: dict[str, list[Row]] = {}
    for row in result.rows(too_small(result.left_out)):
        if row.trace in ran:
            found.setdefault(row.trace, []).append(row)
    return found


def _groups(rows: Sequence[Row], view: str, width: int) -> Iterator[tuple[str, Table[Row]]]:
    """The tables of one trace: those of all figures, or a short one."""
    some = any(row.answers for row in rows)
    first = "Answers, memory and moves" if some else "Memory and moves"
    ran = [row for row in rows if not row.left_out]
    groups = {first: (*ANSWERS, *memory(ran)), "Time and quality": TIME}
    if view == "short":
        zero = ("peak_ddr", "moved")
        groups = {"": tuple(replace(COLUMNS[key], hide=NOTHING) if key in zero else COLUMNS[key]
                            for key in _DECIDING)}  # fmt: skip
    if any(row.equal and row.equal.measure == "byte-seconds" for row in rows):
        groups = {title: (*PAGE_MEMORY[1:] * (not done), *columns)
                  for done, (title, columns) in enumerate(groups.items())}  # fmt: skip
    # Speed relative to full is the inverse of time relative to full: seldom room to say it twice.
    spare = () if width >= WIDE else ("speed_vs_full",)
    for title, columns in groups.items():
        table = Table(rows, (*leading(rows), *shown(columns, ran)), lambda row: row.budget_label,
                      reason=lambda row: row.left_out)  # fmt: skip
        yield title, table.without(spare)


def matrix(rows: Sequence[Row], width: int) -> list[str]:
    """Lines for a terminal of `width` columns, from the rows of one trace.

    The oracle comes first, then policies whose answers were counted live, then those of which none
    were; those that do not keep to the budget come last.  A row that was left out has its reason in
    place of figures.
    """
    zero = ("peak_ddr", "rehydrations")
    ran = [row for row in rows if not row.left_out]
    columns = shown([replace(COLUMNS[key], hide=NOTHING) if key in zero else COLUMNS[key]
                     for key in _HEADS], ran)  # fmt: skip
    # Three digits are enough to compare.
    units = {
        key: scale
        if scale.unit in ("%", "pp", "x")
        else replace(scale, decimals=max(0, scale.decimals - 1))
        for key, scale in scales(columns, ran).items()
    }
    lines = [_always(row, columns, units) for row in rows if row.budget == ANY]
    lines += [""] if lines else []
    others = [row for row in rows if row.budget != ANY]
    if not others:
        return lines
    names = {row.policy: _fitted(row.label) for row in others}
    longest = max(len("policy"), *map(len, names.values()))
    choices = [columns]
    for key in _RELATIVE:
        choices.append(tuple(column for column in choices[-1] if column.key != key))

    def fitted(
        budgets: Sequence[str], choices: Sequence[Sequence[Column[Row]]], between: str
    ) -> list[str]:
        """Names and a block per budget with the most columns and air that fit, or the least."""
        own = [row for row in others if row.budget in budgets]
        ranked = _ranked(own, budgets)
        lines: list[str] = []
        for some, air in itertools.product(choices, (2, 1)):
            blocks = [_block(own, ranked, budget, some, units, air) for budget in budgets]
            above = len(blocks[0]) - len(ranked)
            first = [*[""] * (above - 1), "policy", *(names[policy] for policy in ranked)]
            texts = zip([name.ljust(longest) for name in first], *blocks, strict=True)
            lines = [(between or " " * air).join(text) for text in texts]
            rule = "".join("┼" if c == "│" else "─" for c in lines[above - 1])
            lines = [*(line.rstrip() for line in lines[:above]), rule, *lines[above:], ""]
            if max(map(len, lines)) <= width:
                break
        return lines

    budgets = list(dict.fromkeys(row.budget for row in others))
    together = fitted(budgets, choices[1:], _BETWEEN_BUDGETS)
    if max(map(len, together)) <= width:
        return lines + together
    return [*lines, *(line for budget in budgets for line in fitted([budget], choices, ""))]


def _always(row: Row, columns: Sequence[Column[Row]], units: dict[str, Scale]) -> str:
    """A policy that does not know budgets, full retention above all: said once."""
    words = {"kept": "kept", "error": "error", "peak_hbm": "in HBM", "peak_ddr": "in DDR",
             "total": ""}  # fmt: skip
    parts = [
        f"{c.show(row, units[c.key])} {units[c.key].unit} {words[c.key]}".strip()
        for c in columns
        if c.key in words and c.value(row)
    ]
    return f"{_fitted(row.label)}, whatever the budget: {', '.join(parts)}"


def _ranked(rows: Sequence[Row], budgets: Sequence[str]) -> list[str]:
    """The oracle, then policies by right answers under the first budget, then the next.

    Those of which none were counted follow, by their HBM peak; policies that hold more than the
    budget compare with each other only, and come last; what was left out under a budget follows
    what was not.  Attention kept ranks nothing: it is no measure of answers.
    """
    by_cell = {(row.policy, row.budget): row for row in rows}

    def rank(policy: str, budget: str) -> tuple[bool, bool, float, int]:
        row = by_cell.get((policy, budget))
        if row is None or row.left_out:
            return True, True, 0.0, 0
        found = row.answers if row.answers and row.answers.exact else None
        return False, found is None, -found.accuracy if found else 0.0, row.peak_hbm_kv_bytes

    def place(row: Row) -> tuple[Any, ...]:
        ranks = [rank(row.policy, budget) for budget in budgets]
        return not row.is_oracle, not row.bounded, ranks, row.policy

    return list(dict.fromkeys(row.policy for row in sorted(rows, key=place)))


def _block(
    rows: Sequence[Row],
    policies: Sequence[str],
    budget: str,
    columns: Sequence[Column[Row]],
    units: dict[str, Scale],
    air: int,
) -> list[str]:
    """Title, heads and a line per policy, all of the same width; blank where there is no row.

    Of the reason of what was left out, it has what a budget would have to be.
    """
    own = {row.policy: row for row in rows if row.budget == budget}
    above = any(column.key in _ABOVE for column in columns)
    parts = []
    for column in columns:
        scale = units[column.key]
        cells = [_ABOVE.get(column.key, "")] * above + [_HEADS[column.key], scale.unit]
        cells += [column.show(own[p], scale) if p in own and not own[p].left_out else ""
                  for p in policies]  # fmt: skip
        width = max(map(len, cells))
        parts.append([cell.rjust(width) for cell in cells])
    lines = [(" " * air).join(cells) for cells in zip(*parts, strict=True)]
    title = f"budget {budget}"
    reasons = [own[p].left_out.partition(":")[0] if p in own else "" for p in policies]
    width = max(len(lines[0]), len(title), *map(len, reasons))
    heads = [line.rjust(width) for line in lines[: -len(policies)]]
    cells = [(reason or line).rjust(width)
             for reason, line in zip(reasons, lines[-len(policies) :], strict=True)]  # fmt: skip
    return [f" {title} ".center(width, "─")[:width], *heads, *cells]


def _fitted(name: str) -> str:
    """A name that is too long loses its front: `package.module:` matters least."""
    name = plain(name)
    return name if len(name) <= _LONGEST_NAME else "…" + name[1 - _LONGEST_NAME :]


_NOTHING = EpisodeResult("", 0, "", "", 0, Measurements(), math.nan)  # for its column names


def to_frame(result: ReplayResult) -> pd.DataFrame:
    """One row per search, policy and budget, in the order of `result.episodes`; nothing is rounded.

    Names carry their units, and the same result gives the same bytes.  What could not run has a row
    for all searches of a trace at the end: its reason is in `left_out`, and nothing else is known.
    """
    import pandas as pd

    columns = list(flat_sample())
    bounds = oracles(result.episodes)
    equal = result.found()
    found = [_flat(episode, bounds) for episode in result.episodes]
    for row in found:
        if one := equal.get((row["trace"], row["policy"], row["budget"])):
            row |= {"budget_found": one.found, "memory_wanted": one.wanted}
    missing = [
        {"trace": each.trace, "policy": each.policy, "budget": each.budget or ANY,
         "left_out": each.reason}
        for each in result.left_out
    ]  # fmt: skip
    columns += [name for name in (found[0] if found else ()) if name not in columns]
    texts = ("per", "attention_kept_note", "budget_found")
    return with_left_out(pd.DataFrame(found, columns=columns), missing, texts)


def flat_sample() -> dict[str, Any]:
    """A row of `to_frame` that says nothing: for its columns and their types."""
    return _flat(_NOTHING, {})


def _flat(result: EpisodeResult, bounds: dict[tuple[str, int, str, str], float]) -> dict[str, Any]:
    measured = result.measured
    where = result.trace, result.episode, result.budget, result.per
    bound = bounds.get(where, math.nan)
    return {
        "trace": result.trace,
        "episode": result.episode,
        "policy": result.policy,
        "budget": result.budget,
        "budget_tokens": result.budget_tokens,
        **flat_measurements(measured),
        "total_s": measured.time.total_s,
        "tokens_per_s": measured.tokens_per_s,
        "per": result.per,
        "attention_kept": result.attention_kept,
        "attention_kept_note": result.kept_note,
        "oracle_gap": bound - result.attention_kept,
        "output_error": result.output_error,
        "bounded": result.bounded,
        "left_out": "",
        "budget_found": "",  # in a comparison at equal memory
        "memory_wanted": math.nan,
    }


def flat_measurements(measured: Measurements) -> dict[str, Any]:
    """What was counted, and the parts of the time."""
    found = {**vars(measured), **vars(measured.time)}
    del found["time"], found["series"], found["stored"]
    return {**found, **stored_columns(measured.stored)}


def to_json(result: ReplayResult) -> str:
    """Settings, aggregated rows and searches as strict JSON (unknown numbers are null)."""
    bounds = oracles(result.episodes)
    return documents.to_json({
        "settings": result.settings,
        "assumed": result.assumed,
        "rows": [
            {**asdict(row), "moved_bytes": row.moved_bytes, "tokens_per_s": row.tokens_per_s,
             "read_bytes_per_token": row.read_bytes_per_token,
             "total_s": row.time.total_s}
            for row in result.rows(result.left_out)
        ],
        "episodes": [_flat(episode, bounds) for episode in result.episodes],
        "notes": result.notes,
        "does_not_fit": result.does_not_fit,
        "left_out": result.left_out,
    })  # fmt: skip
