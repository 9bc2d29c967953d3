"""`arborsim replay`: its columns, its tables in a terminal, and its results as JSON and data frame.

Few settings are shown in a table per trace, many in a matrix: a line per policy.  Both have the
figures that decide; wide terminals, and ``--view table``, have all.  Budgets of a matrix
stand side by side where the terminal is wide enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from arborsim.core import documents
from arborsim.core.measurements import Measurements, Stored, stored_columns
from arborsim.core.tables import with_left_out
from arborsim.core.tiers import BELOW_DDR
from arborsim.core.units import Scale, scale_for
from arborsim.play.results import ANY, EpisodeResult, ReplayResult, Row, oracles
from arborsim.policies.registry import names
from arborsim.products.replay import answers_words
from arborsim.products.replay.words import too_small
from arborsim.report.report import Printed
from arborsim.report.table import NOTHING, Column, Table, name_column, read_columns, shown
from arborsim.report.words import counted, interval

if TYPE_CHECKING:
    import pandas as pd

_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "right": answers_words.short,
    "difference": answers_words.difference,
    "kl": answers_words.divergence,
    "interval": lambda row: interval(row.answers.low, row.answers.high) if row.answers else "",
    "found": lambda row: row.equal.found if row.equal else "",
    "off": lambda row: f"{100 * row.equal.off + 0.0:+.1f}" if row.equal else "",
    "moved_bytes of stored": lambda each: each.to_bytes + each.from_bytes,
}
#: Columns by group: ``columns.toml`` declares them.
GROUPS = read_columns("arborsim.products.replay", _FUNCTIONS)
NAMES, ANSWERS, MEMORY, TIME = (GROUPS[name] for name in ("names", "answers", "memory", "time"))
_OWN = ("names", "answers", "fidelity", "equal", "memory", "time", "full", "page", "other")


def _stored(memory: str, column: Column[Stored]) -> Column[Row]:
    """A column of a memory below DDR; gone where nothing is put there."""
    return Column(
        f"{memory.lower()}_{column.key}",
        f"{memory} {column.title}",
        column.kind,
        lambda row: column.value(row.stored.get(memory, Stored())),
        column.about.format(memory=memory),
        (memory, column.title.split()[-1]),
        column.family,
        hide=NOTHING,
    )


STORED = tuple(_stored(memory, each) for memory in BELOW_DDR for each in GROUPS["stored"])
COLUMNS: dict[str, Column[Row]] = {each.key: each for name in _OWN for each in GROUPS[name]}
COLUMNS |= {each.key: each for each in STORED}


def memory(rows: Sequence[Row]) -> tuple[Column[Row], ...]:
    """`MEMORY`; what is read only where a policy chooses that."""
    chosen = any(row.bounds_read_bytes for row in rows)
    return tuple(c for c in (*MEMORY, *STORED) if chosen or c.key != "read")


VIEWS = ("auto", "table", "matrix")
#: From this width on, all figures stand in one table.
WIDE = 140
#: With more rows per trace than this, `auto` shows the matrix.
_MOST_ROWS = 24
#: Columns that others imply: the first to go where there is no room.
IMPLIED = (
    *("right_interval", "total", "off", "speed_vs_full", "tokens_per_s", "model", "peak_hbm"),
    *("hbm_vs_full", "at_once_vs", "time_vs_full", "quantised", "moved"),
)


def printed(result: ReplayResult, view: str, width: int) -> Iterator[Printed]:
    """A block per trace for a terminal.

    `view` ``"table"`` has all figures, full retention and the oracle: below `WIDE` columns two
    tables per trace (memory and moves; time and quality), which fit 80 columns, above it one.
    ``"matrix"`` has a line per policy and the figures that decide.  ``"auto"`` takes the matrix
    where there is much to compare, and otherwise a table of those that decide, of the policies that
    were asked for.
    """
    traces = _by_trace(result)
    if view == "auto":
        asked = {t: [row for row in own if result.was_asked(row)] for t, own in traces.items()}
        traces = {t: asked[t] or own for t, own in traces.items()}
        many = max(map(len, traces.values()), default=0) > _MOST_ROWS
        view = "matrix" if many else "short"
    for own in traces.values():
        first = next(row for row in own if not row.left_out)
        tokens = f"{first.prompt_tokens:,} prompt + {first.generated_tokens:,} generated tokens"
        about = f"{counted(first.searches, 'search')}, {tokens}" if len(traces) > 1 else ""
        tables: Iterator[tuple[str, Table[Any]]] = _groups(own, view, width)
        yield first.trace if about else "", about, list(matrix(own) if view == "matrix" else tables)


def leading(rows: Sequence[Row]) -> tuple[Column[Row], ...]:
    """The columns that say what a row is."""
    return (*NAMES, *GROUPS["equal"]) if any(row.equal for row in rows) else NAMES


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
    groups = {first: (*ANSWERS, *memory(ran)), "Time and quality": (*GROUPS["fidelity"], *TIME)}
    if view == "short":
        deciding = _deciding("short", ran)
        place = 1 + [column.key for column in deciding].index("moved")
        groups = {"": (*deciding[:place], *STORED, *deciding[place:])}
    if any(row.equal and row.equal.measure == "byte-seconds" for row in rows):
        first, *_ = groups
        groups[first] = (*GROUPS["page"][1:], *groups[first])
    # Speed relative to full is the inverse of time relative to full: seldom room to say it twice.
    said = () if width >= WIDE else ("speed_vs_full",)
    whole = Table(
        rows,
        (),
        lambda row: row.budget_label,
        reason=no_result,
        look=lambda row: "chosen" if row.policy not in names() else "",
    )
    for title, columns in groups.items():
        yield title, whole.under((*leading(rows), *shown(columns, ran))).without(said)


def no_result(row: Row) -> str:
    """Why a row has no figures: it could not run, or had nothing to do."""
    return row.left_out or ("nothing evicted: every search fits" if row.idle else "")


def _deciding(group: str, rows: Sequence[Row]) -> tuple[Column[Row], ...]:
    """The figures that decide: of a full GPU where they are known, else of a search by itself."""
    full = any(not math.isnan(row.at_once) for row in rows)
    slower = any(row.relative.time >= 1.05 for row in rows)
    alone = ("total", "time_vs_full", *["hbm_vs_full"] * (group == "matrix"))
    if not full or (slower and group == "short"):
        alone = ()
    return tuple(column for column in GROUPS[group] if column.key not in alone)


def matrix(rows: Sequence[Row]) -> Iterator[tuple[str, Table[str]]]:
    """The figures that decide, a table per budget with a line per policy.

    The oracle comes first, then policies whose answers were counted live, then those of which none
    were; those that do not keep to the budget come last.  A row that was left out says what a
    budget would have to be.
    """
    known = [row for row in rows if not row.left_out]
    columns = shown(_deciding("matrix", known), known)
    cells = {(row.policy, row.budget): row for row in rows}
    budgets = list(dict.fromkeys(row.budget for row in rows if row.budget != ANY)) or [ANY]
    policies = _ranked(rows, budgets)
    names = {row.policy: row.label for row in rows}
    name: Column[str] = name_column("Policy", names.__getitem__)
    for budget in budgets:
        own = {each: cells.get((each, budget)) or cells.get((each, ANY)) for each in policies}
        parts = [_of_policy(column, budget, own, not place) for place, column in enumerate(columns)]
        yield f"budget {budget}", Table(policies, (name, *parts))


def _of_policy(
    column: Column[Row], budget: str, rows: Mapping[str, Row | None], leads: bool
) -> Column[str]:
    """A column under one budget; blank where nothing ran, and the first says why."""

    def read(policy: str) -> float:
        row = rows[policy]
        return math.nan if row is None or row.left_out else column.value(row)

    def words(policy: str) -> str:
        row = rows[policy]
        if row is None or row.left_out:
            return (row.left_out.partition(":")[0] if row and leads else "") or " "
        return column.words(row)

    def text(policy: str) -> str:
        row = rows[policy]
        return words(policy) if row is None or row.left_out else column.show(row)

    return Column(
        column.key,
        column.title,
        column.kind,
        read,
        head=(*[f"at {budget}"] * leads, *filter(None, column.head)),
        family=column.family or column.key,
        text=text if column.text else None,
        words=words,
        scale=partial(_coarse, column),
    )


def _coarse(column: Column[Row], values: Sequence[float]) -> Scale:
    """The unit of a column with three digits, which are enough to compare."""
    found = column.scale(values) if column.scale else scale_for(column.kind, values)
    compared = found.unit in ("%", "pp", "x")
    return found if compared else replace(found, decimals=max(0, found.decimals - 1))


def _ranked(rows: Sequence[Row], budgets: Sequence[str]) -> list[str]:
    """Those that know no budget, the oracle, then policies by right answers, budget by budget.

    Those of which none were counted follow, by fidelity, then by their HBM peak; policies that hold
    more than the budget compare with each other only, and come last; what was left out under a
    budget follows what was not.  Attention kept ranks nothing: it is no measure of answers.
    """
    by_cell = {(row.policy, row.budget): row for row in rows}

    def rank(policy: str, budget: str) -> tuple[bool, bool, float, int]:
        row = by_cell.get((policy, budget))
        if row is None or row.left_out:
            return True, True, 0.0, 0
        found = row.answers if row.answers and row.answers.exact else None
        near = row.fidelity.kl if row.fidelity else math.inf
        return False, found is None, -found.accuracy if found else near, row.peak_hbm_kv_bytes

    def place(row: Row) -> tuple[Any, ...]:
        ranks = [rank(row.policy, budget) for budget in budgets]
        return row.budget != ANY, not row.is_oracle, not row.bounded, ranks, row.policy

    return list(dict.fromkeys(row.policy for row in sorted(rows, key=place)))


def to_frame(result: ReplayResult) -> pd.DataFrame:
    """One row per search, policy and budget, in the order of `result.episodes`; nothing is rounded.

    Names carry their units, and the same result gives the same bytes.  What could not run has a row
    for all searches of a trace at the end: its reason is in `left_out`, and nothing else is known.
    """
    import pandas as pd

    bounds, equal = oracles(result.episodes), result.found()
    found = [_flat(episode, bounds) for episode in result.episodes]
    for row in found:
        if one := equal.get((row["trace"], row["policy"], row["budget"])):
            row |= {"budget_found": one.found, "memory_wanted": one.wanted}
    missing = [
        dict(zip(_MISSING, (each.trace, each.policy, each.budget or ANY, each.reason), strict=True))
        for each in result.left_out
    ]
    texts = ("per", "attention_kept_note", "budget_found")
    columns = list(dict.fromkeys([*flat_sample(), *(found[0] if found else ())]))
    return with_left_out(pd.DataFrame(found, columns=columns), missing, texts)


#: What a row of what could not run knows.
_MISSING = ("trace", "policy", "budget", "left_out")


def flat_sample() -> dict[str, Any]:
    """A row of `to_frame` that says nothing: for its columns and their types."""
    return _flat(EpisodeResult("", 0, "", "", 0, Measurements(), math.nan), {})


def _flat(result: EpisodeResult, bounds: dict[tuple[str, int, str, str], float]) -> dict[str, Any]:
    measured = result.measured
    bound = bounds.get((result.trace, result.episode, result.budget, result.per), math.nan)
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
    """All counters, and the parts of the time."""
    found = {**vars(measured), **vars(measured.time)}
    del found["time"], found["series"], found["stored"]
    return {**found, **stored_columns(measured.stored)}


#: Figures of a row's JSON that follow from its others.
DERIVED = ("moved_bytes", "read_bytes_per_token", "tokens_per_s", "total_s")


def to_json(result: ReplayResult) -> str:
    """Settings, aggregated rows and searches as strict JSON (unknown numbers are null)."""
    bounds = oracles(result.episodes)
    said = ("settings", "assumed", "notes", "does_not_fit", "left_out")
    rows = [
        asdict(row) | {name: getattr(row, name) for name in DERIVED}
        for row in result.rows(result.left_out)
    ]
    episodes = [_flat(episode, bounds) for episode in result.episodes]
    found = {name: getattr(result, name) for name in said}
    return documents.to_json({**found, "rows": rows, "episodes": episodes})
