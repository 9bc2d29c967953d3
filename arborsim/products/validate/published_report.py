"""Published serving runs, simulated against measured: errors by group, targets, the worst runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from arborsim.core.errors import UnknownName
from arborsim.core.tables import made_by, write_table
from arborsim.products.validate import published, published_errors
from arborsim.products.validate.aiconfigurator import NotPredicted, Prediction
from arborsim.products.validate.published import LATENCY_PERCENTILES, PlayedRun
from arborsim.products.validate.published_errors import ErrorLine
from arborsim.report import page
from arborsim.report.report import (
    Answer,
    Choice,
    Facts,
    Figures,
    Listed,
    Printed,
    Report,
    Section,
    Shown,
)
from arborsim.report.table import LABEL, REMARK, Column, Table, name_column
from arborsim.report.words import counted, percent

if TYPE_CHECKING:
    import pandas as pd

FORMATS = (".csv", ".parquet")
_ERRORS = (
    "Of judged runs: median and 90th percentile (p90) of the size of the error, and the median "
    "with its sign, above zero where simulated is more. Click a column to sort by it."
)
_OTHERS = (
    "Errors of the time per output token: AIConfigurator's (AIC) on judged runs that it predicts, "
    "and ours on the same runs."
)
_SCATTER = (
    "Measured against simulated, in milliseconds; on the line both are the same. A colour per "
    "engine, a symbol per GPU; point at a run for its name. Runs that constants may be fitted on "
    "are hidden until you click them in the legend."
)
_SHARES = "Share of judged runs whose time per output token is off by at most this."
_WORST = (
    "Judged runs whose time per output token is off by the largest factor, simulated over measured."
)


@dataclass(frozen=True)
class Published:
    """Runs that were compared, in the order of their file, and what made the numbers."""

    runs: tuple[PlayedRun, ...]
    about: Mapping[str, str]


def _errors(key: str, short: str, about: str, signed: bool = True) -> tuple[Column[ErrorLine], ...]:
    """The columns of one figure: runs, median, 90th percentile and median with its sign."""

    def column(part: str, title: str, said: str, form: str) -> Column[ErrorLine]:
        def value(line: ErrorLine) -> float:
            return float(getattr(getattr(line, key), part))

        def text(line: ErrorLine) -> str:
            return "" if math.isnan(value(line)) else format(value(line), form)

        name, means = f"{short} {title}", f"{about}: {said}"
        return Column(f"{key}_{part}", name, "count", value, means, (short, title), text=text)

    found = (
        column("n", "n", "runs", ".0f"),
        column("median", "median", "median size of the error", ".1%"),
        column("high", "p90", "90th percentile of the size of the error", ".1%"),
        column("signed", "signed", "median error; above 0, simulated is more", "+.1%"),
    )
    return found if signed else found[:3]


NAME: Column[ErrorLine] = name_column("runs", lambda line: line.name)
TPOT = _errors("tpot", "TPOT", "time per output token")
TTFT = _errors("ttft", "TTFT", "time to first token, in runs in which little queues")
RATE = _errors("throughput", "tok/s", "output tokens per second")
_AIC = "AIConfigurator's time per output token, where it gives one"
OTHER = _errors("other", "AIC", _AIC, signed=False)
OURS = _errors("ours", "ours", "time per output token, on the same runs", signed=False)
OTHERS = (*OTHER, *OURS[1:])
ERRORS = (*TPOT, *TTFT, *RATE)


def _ms(key: str, read: Callable[[PlayedRun], float]) -> Column[PlayedRun]:
    return Column(key, f"{key} ms", "count", read, text=lambda run: f"{read(run):.2f}")


def _factor(run: PlayedRun) -> float:
    return 1 + run.tpot_error


def _simulated(run: PlayedRun) -> float:
    return 1e3 * run.simulated.tpot_s if run.simulated else math.nan


def _clients(run: PlayedRun) -> float:
    return run.run.concurrency


_OFF = "simulated over measured time per output token"
WORST: tuple[Column[PlayedRun], ...] = (
    name_column("model", lambda each: f"{each.run.model} {each.run.weights}"),
    name_column("on", lambda each: f"{each.run.gpus} x {each.run.gpu}", LABEL),
    name_column("engine", lambda each: f"{each.run.engine} {each.run.engine_version}", LABEL),
    name_column(
        "tokens", lambda each: f"{each.run.prompt_tokens} + {each.run.output_tokens}", LABEL
    ),
    Column("clients", "clients", "count", _clients, text=lambda each: str(each.run.concurrency)),
    _ms("measured", lambda each: each.run.tpot_ms),
    _ms("simulated", _simulated),
    Column("factor", "factor", "count", _factor, _OFF, text=lambda each: f"{_factor(each):.2f}"),
    name_column("odd", lambda each: each.odd, REMARK),
)


def error_table(
    runs: Sequence[PlayedRun], columns: Sequence[Column[ErrorLine]]
) -> Table[ErrorLine]:
    """Errors of all runs and by group, without columns of which no line has a figure."""
    lines = published_errors.error_lines(runs)
    kept = [column for column in columns if not column.empty(lines)]
    return Table(
        lines,
        (NAME, *kept),
        section=lambda line: line.group,
        titled=True,
        look=lambda line: "chosen" if line.name == "all judged" else "",
    )


def sentences(runs: Sequence[PlayedRun]) -> list[str]:
    """The answer, each target, and what was not played; the first is the headline."""
    lines = published_errors.error_lines(runs)
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
            for target in published_errors.targets(runs)
        ]
    if distant := sorted({each.run.engine_name for each in runs if published.far(each.run)}):
        near = next((line.tpot for line in lines if line.name == published_errors.NEAR), None)
        without = f" Without them it is {percent(near.median)} (n {near.n})." if near else ""
        said.append(
            f"No constant was fitted to these versions, and their errors are larger: "
            f"{', '.join(distant)}.{without}"
        )
    if not lines[0].ttft.n and every.n:
        said.append("Something queues in all judged runs: times to first token are not judged.")
    if missing := sum(not each.simulated for each in runs):
        said.append(f"{missing:,} of {counted(len(runs), 'run')} could not be played.")
    return said


def not_played(runs: Sequence[Any]) -> list[str]:
    """Why runs could not be played, with their number, the most frequent reason first."""
    reasons = Counter(each.reason for each in runs if each.reason)
    return [f"{counted(number, 'run')}: {reason}" for reason, number in reasons.most_common()]


def odd_runs(runs: Sequence[PlayedRun]) -> list[str]:
    """Runs whose measurements cannot be what they seem, by name."""
    return [f"{each.run.name}: {each.odd}" for each in runs if each.odd]


def _printed(runs: Sequence[PlayedRun], width: int) -> Iterator[Printed]:
    yield (
        "",
        "",
        [
            ("Time per output token (TPOT)", error_table(runs, TPOT)),
            ("Time to first token (TTFT) where little queues", error_table(runs, TTFT)),
            ("Output tokens per second", error_table(runs, RATE)),
            ("AIConfigurator's TPOT (AIC), and ours on the same runs", error_table(runs, OTHERS)),
        ],
    )


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
    latency_s = made.latency_s if made else ()
    for percentile, seconds in zip_longest(LATENCY_PERCENTILES, latency_s, fillvalue=math.nan):
        row[f"simulated_e2e_p{percentile:g}_ms"] = 1e3 * seconds
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


def report_of(result: Published) -> Report:
    """Make the report of the runs."""
    runs = result.runs
    played = [each for each in runs if each.simulated]
    errors, others = error_table(runs, ERRORS), error_table(runs, OTHERS)
    asked = len(others.columns) > 1
    sections = [Section("answer", "The answer", (Answer(sentences(runs)),))]
    if played:
        worst = Shown(
            Table(published_errors.worst(runs), WORST),
            "worst-table",
            "Worst runs",
            printed=lambda width: [("Worst judged runs", "", [("", worst.table)])],
        )
        shown = Shown(errors, "errors-table", "Errors by group", printed=partial(_printed, runs))
        theirs = Shown(
            others,
            "others-table",
            "AIConfigurator's errors by group",
            printed=lambda width: (),  # errors by group have them in a terminal
        )
        sections += [
            Section("errors", "Errors by group", (_ERRORS, shown)),
            Section("others", "Next to AIConfigurator", (_OTHERS, *[theirs] * asked)),
            Section("worst", "The worst runs", (_WORST, worst)),
        ]

    def pictures() -> Iterator[Section]:
        if played:
            points = Figures("scatter", [Choice(scatter(played))])
            yield Section("scatter", "Time per output token, run by run", (_SCATTER, points))
            steps = Figures("shares", [Choice(shares(played))])
            yield Section("shares", "How many runs are off by how much", (_SHARES, steps))

    definitions = errors.definitions() | (others.definitions() if asked else {})
    return Report(
        "published",
        "Published serving runs",
        f"{counted(len(played), 'run')} of {len(runs):,} played: {result.about['runs']}",
        sections,
        pictures,
        (
            Listed(odd_runs(runs), "Odd runs, counted all the same", printed=True),
            Listed(not_played(runs), "Not played", printed=True),
            Facts("What was assumed", assumptions()),
            Facts("Settings", dict(result.about)),
            Facts("Columns", definitions),
        ),
        {"arborsim-published.csv": partial(to_frame, result)},
        leading=sentences(runs),
    )


def assumptions() -> dict[str, str]:
    """Facts that the runs do not state, and how they were played."""
    low = published.SHORTEST_SHARE
    return {
        "clients": f"a closed loop, all there at 0, {published.REQUESTS_PER_CLIENT} requests each",
        "lengths": (
            f"as stated; of the dated nightly benchmarks, evenly from {low:g} of that on, as "
            f"{published.LENGTHS} lengths each"
        ),
        "tokens per second": "measured ones by Little's law, from both times and the clients",
        "KV cache": "bf16; fp8 for quantised checkpoints under TensorRT-LLM",
        "prompts": "as the engine computes them: in steps of up to its limit of tokens",
        "little queues": (
            f"the median request waits for less than {published.LITTLE_QUEUEING:.0%} of its "
            "simulated time to first token: other times to first token are not judged"
        ),
        "judged": "runs that no constant was fitted on: those with an odd identifier, or none",
        "odd": (
            "the weights exceed the memory, or prompts would take more than "
            f"{published.MOST_OF_PEAK:.0%} of the GPUs' peak"
        ),
    }


def scatter(runs: Sequence[PlayedRun]) -> page.Figure:
    """Measured against simulated time per output token: a colour per engine, a symbol per GPU."""
    engines = sorted({each.run.engine for each in runs})
    gpus = sorted({each.run.gpu for each in runs})
    data = [_line(runs)]
    for number, engine in enumerate(engines):
        for symbol, gpu in enumerate(gpus):
            own = [each for each in runs if (each.run.engine, each.run.gpu) == (engine, gpu)]
            judged = [each for each in own if not each.run.fitted]
            if judged:
                data.append(_markers(f"{engine}, {gpu}", judged, page.colour(1 + number), symbol))
    if fitted := [each for each in runs if each.run.fitted]:
        data.append({**_markers("fitted", fitted, "var(--soft)", 0), "visible": "legendonly"})
    x, y = (
        page.axis(f"{side}, ms per output token") | page.size_axis(_ends(runs), 1.0)
        for side in ("measured", "simulated")
    )
    return page.figure(data, x, y, 560)


def _ends(runs: Sequence[PlayedRun]) -> list[float]:
    """The least and the largest time per output token in ms, measured or simulated."""
    both = [each.run.tpot_ms for each in runs]
    both += [1e3 * each.simulated.tpot_s for each in runs if each.simulated]
    return [min(both), max(both)]


def _line(runs: Sequence[PlayedRun]) -> page.Figure:
    ends = _ends(runs)
    line = {"color": "var(--bound)", "width": 1.5, "dash": "dash"}
    return page.scatter("", ends, ends, line=line, hoverinfo="skip", showlegend=False)


def _markers(name: str, runs: Sequence[PlayedRun], paint: str, symbol: int) -> page.Figure:
    tip = "%{customdata}<br>measured %{x:.4g} ms<br>simulated %{y:.4g} ms<extra></extra>"
    x = [page.rounded(each.run.tpot_ms) for each in runs]
    y = [page.rounded(_simulated(each)) for each in runs]
    names = [page.label(each.run.name) for each in runs]
    marker = {"color": paint, "size": 7, "symbol": page.symbol(symbol), "opacity": 0.7}
    tips: page.Figure = {"customdata": names, "hovertemplate": tip}
    return page.scatter(name, x, y, "markers", marker=marker, **tips)


def shares(runs: Sequence[PlayedRun]) -> page.Figure:
    """Share of judged runs against the size of their error: of all, and by engine."""
    judged = [each for each in runs if not each.run.fitted]
    engines = sorted({each.run.engine for each in judged})
    data = [_steps("all", judged, "var(--c0)")] if judged else []
    for number, engine in enumerate(engines):
        own = [each for each in judged if each.run.engine == engine]
        data.append(_steps(engine, own, page.colour(1 + number)))
    x = page.axis("size of the error (%)", rangemode="tozero")
    return page.figure(data, x, page.axis("share of runs (%)", range=[0, 101]), 380)


def _steps(name: str, runs: Sequence[PlayedRun], paint: str) -> page.Figure:
    sizes = np.sort([100 * abs(each.tpot_error) for each in runs])
    share: Any = 100 * np.arange(1, len(sizes) + 1) / len(sizes)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": page.label(name),
        "x": page.packed(sizes),
        "y": page.packed(share),
        "line": {"shape": "hv", "color": paint, "width": 2},
        "hovertemplate": "%{y:.0f}% of runs within %{x:.1f}%",
    }
