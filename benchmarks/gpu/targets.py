"""What was aimed at, and what a run found: a line per target."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.intervals import mean_interval
from benchmarks.gpu.plan import YARDSTICKS

Facts = dict[str, Any]
FULL, IN_DDR = "full", "half in DDR, stage"
IN_DDR_ALL = (IN_DDR, "half in DDR, stream", "half in DDR, near")
QUARTER = ("streaming-llm", "epikv", "h2o per=shared", "arkv")  # arms with a quarter of the tokens
FLOOR_AT = 32768


@dataclass(frozen=True)
class Figure:
    """A figure over repeats; without an interval if there was one."""

    mean: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        """Mean and 95% interval (Student's t)."""
        return cls(*mean_interval(values), len(values))

    def text(self, form: str = "{:.2f}", scale: float = 1.0) -> str:
        """With its interval, in this form."""
        low, mean, high = (form.format(scale * v) for v in (self.low, self.mean, self.high))
        return f"{mean} [{low}, {high}]" if self.n > 1 else mean


@dataclass(frozen=True)
class Verdict:
    """A target and what became of it; `met` is None where it could not be judged."""

    target: str
    met: bool | None
    said: str

    @property
    def line(self) -> str:
        word = {True: "met", False: "MISSED", None: "not measured"}[self.met]
        return f"{word}: {self.target}" + (f": {self.said}" if self.said else "")


class Results:
    """The records of one device, model and software."""

    def __init__(self, records: Iterable[Facts]) -> None:
        self.records = latest(records)
        self.searches = [r for r in self.records if r["part"] == "search"]
        self.done = [r for r in self.searches if r["outcome"] == "done"]

    def of(self, part: str) -> list[Facts]:
        """Records of one part."""
        return [r for r in self.records if r["part"] == part]

    def one(self, part: str) -> Facts:
        """The last that was done of one part, or nothing."""
        done = [r for r in self.of(part) if r["outcome"] == "done"]
        return done[-1] if done else {}

    def sizes(self) -> list[int]:
        """Prompts that were searched."""
        return sorted({r["of"]["prompt_tokens"] for r in self.searches})

    def repeats(self, arm: str, size: int, graphs: str = "auto") -> dict[int, Facts]:
        """What was done of one arm, by repeat."""
        return {
            r["of"]["repeat"]: r for r in self.done
            if (r["of"]["arm"], r["of"]["prompt_tokens"], r["of"]["graphs"]) == (arm, size, graphs)
        }  # fmt: skip

    def figure(
        self, arm: str, size: int, value: Callable[[Facts], float], graphs: str = "auto"
    ) -> Figure | None:
        """Over repeats; None if there is none."""
        values = [value(r) for r in self.repeats(arm, size, graphs).values()]
        return Figure.of(values) if values else None

    def ratio(self, arm: str, other: str, size: int, graphs: str = "auto") -> Figure | None:
        """Tokens/s of one arm over another's (always with graphs), repeat by repeat."""
        mine, theirs = self.repeats(arm, size, graphs), self.repeats(other, size)
        both = [r for r in mine if r in theirs]
        values = [mine[r]["tokens_per_s"] / theirs[r]["tokens_per_s"] for r in both]
        return Figure.of(values) if values else None

    def of_fastest_yardstick(self, arm: str, size: int) -> tuple[Figure, str] | None:
        """Tokens/s over those of transformers' fastest cache in the mean, and that cache."""
        means = {
            name: figure.mean for name in YARDSTICKS
            if (figure := self.figure(name, size, lambda r: float(r["tokens_per_s"])))
        }  # fmt: skip
        if not means:
            return None
        fastest = max(means, key=lambda name: means[name])
        ratio = self.ratio(arm, fastest, size)
        return (ratio, fastest) if ratio else None

    def policies(self) -> list[str]:
        """Arms that were searched, but for transformers alone."""
        return sorted({r["of"]["arm"] for r in self.done} - set(YARDSTICKS))

    def floor_s(self, record: Facts) -> float | None:
        """Seconds in which the device's memory can be read for a step of this search."""
        known = self.one("yardsticks")
        if not known:
            return None
        rate = max(known["read_bytes_per_s"], known["copy_bytes_per_s"])
        held = record.get("kv_bytes_at_end")
        kv_bytes = held["hbm"] + held["hbm_quantised"] + held["staging"] if held else (
            record["kv_bytes"])  # fmt: skip
        return float(known["step_weight_bytes"] + kv_bytes) / rate


def latest(records: Iterable[Facts]) -> list[Facts]:
    """Records that go with the last start: the same device, model and software.

    Of what was tried again the last counts.
    """
    rows = list(records)
    starts = [r["identity"] for r in rows if r["part"] == "start"]
    found: dict[str, Facts] = {}
    current = None
    for number, record in enumerate(rows):
        if record["part"] == "start":
            current = record["identity"]
        if starts and current == starts[-1]:
            key = repr((record["part"], record["of"])) if record.get("of") else str(number)
            found[key] = record
    return list(found.values())


def verdicts(results: Results) -> list[Verdict]:
    """One per target."""
    return [
        _runs(results), _correct(results), _against_transformers(results),
        _smaller_is_faster(results),
        _share(results, "the policy's share of decoding under 1%", "policy_share", 0.01),
        _copies(results), _peak(results), _time(results),
        _share(results, "exposed transfers under 5% of decoding, half of the tokens in DDR "
               "(staged)", "exposed_share", 0.05, IN_DDR),
        _floor(results),
    ]  # fmt: skip


def _runs(results: Results) -> Verdict:
    """Judged by nothing else: the searches are too short to be timed."""
    tried = [r for r in results.of("smoke") if r["outcome"] != "left out"]
    bad = [f"{r['of']['arm']}, graphs {r['of']['graphs']}" for r in tried if not as_simulated(r)]
    said = f"{len(tried) - len(bad)} of {len(tried)}" + (f"; not: {'; '.join(bad)}" if bad else "")
    target = "a short search of every arm runs, with the bytes that were simulated"
    return Verdict(target, not bad, said) if tried else Verdict(target, None, "")


def as_simulated(record: Facts) -> bool:
    """Whether a search ended, and held what its simulation did; copies land when they land."""
    if record["outcome"] != "done" or record["of"]["arm"] in YARDSTICKS:
        return bool(record["outcome"] == "done")
    equal = record["calls_with_equal_bytes"] == record["calls"]
    return not record["tiers_differ"] and (equal or record["of"]["arm"] in IN_DDR_ALL)


def _correct(results: Results) -> Verdict:
    checks = results.of("correctness")
    wrong = [r for r in checks if r["outcome"] != "left out" and not r.get("ok")]
    names = sorted({r["of"]["check"] for r in wrong})
    ran = sum(r["outcome"] != "left out" for r in checks)
    said = f"{ran - len(wrong)} of {ran}" + (f"; wrong: {', '.join(names)}" if wrong else "")
    return Verdict("every check of correctness holds", not wrong if ran else None, said)


def _judged(
    target: str, found: list[tuple[Figure, str]], ok: Callable[[float], bool], form: str,
    lowest: bool = False, scale: float = 1.0,
) -> Verdict:  # fmt: skip
    """By the worst: the lowest or the largest mean."""
    if not found:
        return Verdict(target, None, "")
    worst, name = (min if lowest else max)(found, key=lambda one: one[0].mean)
    said = f"{worst.text(form, scale)} ({name}), n {worst.n}"
    if len(found) > 1:
        said = f"worst of {len(found)} {said}"
    return Verdict(target, ok(worst.mean), said)


def _against_transformers(results: Results) -> Verdict:
    found = [
        (one[0], f"{one[1]}, {size:,} tokens") for size in results.sizes()
        if (one := results.of_fastest_yardstick(FULL, size))
    ]  # fmt: skip
    target = "full retention at least 0.95x of transformers' fastest cache"
    return _judged(target, found, lambda x: x >= 0.95, "{:.2f}x", lowest=True)


def _smaller_is_faster(results: Results) -> Verdict:
    found = [
        (ratio, f"{arm}, {size:,} tokens") for size in results.sizes() for arm in QUARTER
        if (ratio := results.ratio(arm, FULL, size))
    ]  # fmt: skip
    target = "a quarter of the cache decodes faster than all of it"
    return _judged(target, found, lambda x: x > 1.0, "{:.2f}x", lowest=True)


def _share(results: Results, target: str, name: str, most: float, only: str = "") -> Verdict:
    found = [
        (figure, f"{arm}, {size:,} tokens") for size in results.sizes()
        for arm in results.policies()
        if only in ("", arm) and (figure := results.figure(arm, size, lambda r: float(r[name])))
    ]  # fmt: skip
    return _judged(target, found, lambda x: x < most, "{:.2f}%", scale=100.0)


def _copies(results: Results) -> Verdict:
    target, known = "copies at least 80% of the peak of pinned ones", results.one("yardsticks")
    found = []
    if known:
        for size in results.sizes():
            for way in ("down", "up"):
                rates = [r[f"{way}_bytes_per_s"] / known[f"pinned_{way}_bytes_per_s"]
                         for r in results.repeats(IN_DDR, size).values()
                         if f"{way}_bytes_per_s" in r]  # fmt: skip
                if rates:
                    found.append((Figure.of(rates), f"{way}, {size:,} tokens"))
    return _judged(target, found, lambda x: x >= 0.8, "{:.0f}%", lowest=True, scale=100.0)


def _peak(results: Results) -> Verdict:
    target = "CUDA's peak within 3% of the predicted one"
    found = [
        (figure, f"{arm}, {size:,} tokens") for size in results.sizes()
        for arm in results.policies()
        if (figure := results.figure(arm, size, peak_error)) and figure.mean == figure.mean
    ]  # fmt: skip
    return _judged(target, found, lambda x: x <= 0.03, "{:.1f}%", scale=100.0)


def peak_error(record: Facts) -> float:
    """Predicted against the allocator's peak, relative; NaN on a CPU."""
    real = record["allocator_peak_bytes"]
    return abs(record["predicted_hbm_bytes"] / real - 1) if real else float("nan")


def time_error(record: Facts) -> float:
    """Predicted seconds of the whole search against the measured ones, relative."""
    return float(record["predicted_s"]["total_s"] / record["live_s"]["total_s"] - 1)


def _time(results: Results) -> Verdict:
    target = "predicted seconds within 8% of the measured ones in the median"
    errors = sorted((abs(time_error(r)), f"{r['of']['arm']}, {r['of']['prompt_tokens']:,} tokens")
                    for r in results.done if "predicted_s" in r)  # fmt: skip
    if not errors:
        return Verdict(target, None, "")
    median, (worst, name) = statistics.median(e for e, _ in errors), errors[-1]
    said = f"{median:.1%}, worst {worst:.1%} ({name}), n {len(errors)}"
    return Verdict(target, median <= 0.08, said)


def _floor(results: Results) -> Verdict:
    target = f"a step within 1.5x of its bandwidth floor at {FLOOR_AT:,} tokens (full, graphs)"

    def times(record: Facts) -> float:
        floor_s = results.floor_s(record)
        return float(record["step_s"] / floor_s) if floor_s else float("nan")

    figure = results.figure(FULL, FLOOR_AT, times)
    if figure is None or figure.mean != figure.mean:
        return Verdict(target, None, "")
    return _judged(target, [(figure, FULL)], lambda x: x <= 1.5, "{:.2f}x")
