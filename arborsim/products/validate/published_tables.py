"""Published serving runs, simulated against measured: errors by group, targets, the worst runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborsim.core.errors import UnknownName
from arborsim.core.tables import made_by, write_table
from arborsim.products.validate import published
from arborsim.products.validate.aiconfigurator import NotPredicted, Prediction
from arborsim.products.validate.published import ErrorLine, Errors, PlayedRun
from arborsim.report.table import LABEL, REMARK, Column, Table, name_column, print_tables, terminal
from arborsim.report.words import counted, percent, plain

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

FORMATS = (".csv", ".parquet")


@dataclass(frozen=True)
class Published:
    """Runs that were compared, in the order of their file, and what made the numbers."""

    runs: tuple[PlayedRun, ...]
    about: Mapping[str, str]


def _errors(
    key: str, short: str, about: str, read: Callable[[ErrorLine], Errors], signed: bool = True
) -> tuple[Column[ErrorLine], ...]:
    """The columns of one figure: runs, median, 90th percentile and median with its sign."""

    def column(part: str, title: str, said: str, form: str) -> Column[ErrorLine]:
        def value(line: ErrorLine) -> float:
            return float(getattr(read(line), part))

        def text(line: ErrorLine) -> str:
            return "" if math.isnan(value(line)) else format(value(line), form)

        name = f"{short} {title}"
        return Column(f"{key}_{part}", name, "count", value, f"{about}: {said}", (short, title),
                      text=text)  # fmt: skip

    found = (
        column("n", "n", "runs", ".0f"),
        column("median", "median", "median size of the error", ".1%"),
        column("high", "p90", "90th percentile of the size of the error", ".1%"),
        column("signed", "signed", "median error; above 0, simulated is more", "+.1%"),
    )
    return found if signed else found[:3]


NAME: Column[ErrorLine] = name_column("runs", lambda line: line.name)
TPOT = _errors("tpot", "TPOT", "time per output token", lambda line: line.tpot)
TTFT = _errors(
    "ttft", "TTFT", "time to first token, in runs in which little queues", lambda line: line.ttft
)
RATE = _errors("rate", "tok/s", "output tokens per second", lambda line: line.throughput)
OTHER = _errors(
    "other", "AIC", "AIConfigurator's time per output token, where it gives one",
    lambda line: line.other, signed=False,
)  # fmt: skip
OURS = _errors(
    "ours", "ours", "time per output token, on the same runs", lambda line: line.ours, signed=False
)
OTHERS = (*OTHER, *OURS[1:])
ERRORS = (*TPOT, *TTFT, *RATE)


def _ms(key: str, title: str, read: Callable[[PlayedRun], float]) -> Column[PlayedRun]:
    return Column(key, title, "count", read, text=lambda run: f"{read(run):.2f}")


def _factor(run: PlayedRun) -> float:
    return 1 + run.tpot_error


WORST: tuple[Column[PlayedRun], ...] = (
    name_column("model", lambda each: f"{each.run.model} {each.run.weights}"),
    name_column("on", lambda each: f"{each.run.gpus} x {each.run.gpu}", LABEL),
    name_column("engine", lambda each: f"{each.run.engine} {each.run.engine_version}", LABEL),
    name_column("tokens", lambda each: f"{each.run.prompt_tokens} + {each.run.output_tokens}",
                LABEL),
    Column("clients", "clients", "count", lambda each: each.run.concurrency,
           text=lambda each: str(each.run.concurrency)),
    _ms("measured", "measured ms", lambda each: each.run.tpot_ms),
    _ms("simulated", "simulated ms", lambda each: 1e3 * each.simulated.tpot_s if each.simulated
        else math.nan),
    Column("factor", "factor", "count", _factor, "simulated over measured time per output token",
           text=lambda each: f"{_factor(each):.2f}"),
    name_column("odd", lambda each: each.odd, REMARK),
)  # fmt: skip


def error_table(
    runs: Sequence[PlayedRun], columns: Sequence[Column[ErrorLine]]
) -> Table[ErrorLine]:
    """Errors of all runs and by group, without columns of which no line has a figure."""
    lines = published.error_lines(runs)
    kept = [c for c in columns if any(not math.isnan(c.value(line)) and c.value(line)
                                      for line in lines)]  # fmt: skip
    return Table(
        lines, (NAME, *kept), section=lambda line: line.group, titled=True,
        look=lambda line: "chosen" if line.name == "all judged" else "",
    )  # fmt: skip


def sentences(runs: Sequence[PlayedRun]) -> list[str]:
    """The answer, each target, and what was not played; the first is the headline."""
    lines = published.error_lines(runs)
    every = lines[0].tpot
    if not every.n:
        said = ["No judged run could be played."]
    else:
        said = [
            f"Time per output token is off by {percent(every.median)} in the median and "
            f"{percent(every.high)} at the 90th percentile of {counted(every.n, 'judged run')}."
        ]
        said += [
            f"Target {'met' if target.met else 'missed'}: {target.name}, "
            f"{percent(target.reached)} where {percent(target.limit)} is aimed at (n {target.n})."
            for target in published.targets(runs)
        ]
    if not lines[0].ttft.n and every.n:
        said.append("Something queues in all judged runs: times to first token are not judged.")
    if missing := sum(not each.simulated for each in runs):
        said.append(f"{missing:,} of {counted(len(runs), 'run')} could not be played.")
    return said


def not_played(runs: Sequence[PlayedRun]) -> list[str]:
    """Why runs could not be played, with their number, the most frequent reason first."""
    reasons = Counter(each.reason for each in runs if not each.simulated)
    return [f"{counted(number, 'run')}: {reason}" for reason, number in reasons.most_common()]


def odd_runs(runs: Sequence[PlayedRun]) -> list[str]:
    """Runs whose measurements cannot be what they seem, by name."""
    return [f"{each.run.name}: {each.odd}" for each in runs if each.odd]


def print_published(result: Published, console: Console | None = None) -> None:
    """Print the answer, errors by group, the worst runs, and what is odd or was not played."""
    console = console or terminal()

    def say(text: str, **style: Any) -> None:
        console.print(plain(text), markup=False, **style)

    runs = result.runs
    for sentence in sentences(runs):
        say(sentence)
    if any(each.simulated for each in runs):
        groups = [
            ("Time per output token (TPOT)", error_table(runs, TPOT)),
            ("Time to first token (TTFT) where little queues", error_table(runs, TTFT)),
            ("Output tokens per second", error_table(runs, RATE)),
            ("AIConfigurator's TPOT (AIC), and ours on the same runs", error_table(runs, OTHERS)),
        ]
        print_tables(console, groups)
        say("Worst judged runs, TPOT simulated / measured:")
        for number, each in enumerate(published.worst(runs), 1):
            odd = f" ({each.odd})" if each.odd else ""
            say(f"{number:4}. {_factor(each):.2f}  {each.run.name}{odd}")
    for title, items in (
        ("Odd runs (counted all the same):", odd_runs(runs)),
        ("Not played:", not_played(runs)),
    ):
        if items:
            say(title)
        for item in items:
            say(f"  {item}")


def to_frame(result: Published) -> pd.DataFrame:
    """A row per run: its columns, what was simulated, and how far off that is."""
    import pandas as pd

    frame = pd.DataFrame([_record(each) for each in result.runs])
    for name in ("data_parallel", "concurrency_client"):
        frame[name] = frame[name].astype("Int64").replace(0, pd.NA)  # not said
    return frame


def _record(each: PlayedRun) -> dict[str, Any]:
    made, other = each.simulated, each.other
    predicted = other if isinstance(other, Prediction) else None
    row: dict[str, Any] = {
        **asdict(each.run),
        "side": each.side,
        "odd": each.odd,
        "not_played": each.reason,
        "simulated_tpot_ms": 1e3 * made.tpot_s if made else math.nan,
        "simulated_ttft_ms": 1e3 * made.ttft_s if made else math.nan,
        "simulated_tokens_per_s": made.tokens_per_s if made else math.nan,
        "measured_tokens_per_s": each.measured_tokens_per_s,
        "queueing": made.queueing if made else math.nan,
    }
    if other is not None:
        row |= {
            "aiconfigurator_tpot_ms": 1e3 * predicted.tpot_s if predicted else math.nan,
            "aiconfigurator_ttft_ms": 1e3 * predicted.ttft_s if predicted else math.nan,
            "aiconfigurator_tokens_per_s": predicted.tokens_per_s if predicted else math.nan,
            "aiconfigurator_said": other.reason if isinstance(other, NotPredicted) else "",
        }
    return row


def check_format(path: Path) -> None:
    """Refuse a name from which no format follows."""
    if path.suffix not in FORMATS:
        raise UnknownName("format of --out", path.suffix or path.name, FORMATS)


def write_frame(result: Published, path: Path) -> None:
    """Write a row per run in the format that the name ends with."""
    write_table(to_frame(result), path, made_by("published", "arborsim validate published"))
