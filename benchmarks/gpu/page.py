"""The page about a run, in Markdown: verdicts, then every search, check, trace and context."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.gpu.plan import MODES, RESULTS, TRACES, YARDSTICKS
from benchmarks.gpu.targets import (
    FULL,
    Facts,
    Figure,
    Results,
    as_simulated,
    peak_error,
    time_error,
    verdicts,
)

_GB = 1e9
_NONE = "–"


def page(records: Iterable[Facts], command: str) -> str:
    """The whole page."""
    results = Results(records)
    lines = [
        "# Validation on a device", "",
        f"Made by `{command}`, which goes on where it was interrupted; every result is a line of "
        f"`{RESULTS}`.", "",
        *(f"- {verdict.line}" for verdict in verdicts(results)), "",
        *_about(results), *_searches(results), *_predictions(results), *_smoke(results),
        *_checks(results), *_traces(results), *_contexts(results), *_lost(results),
    ]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    aligned = ["---", *["---:"] * (len(header) - 1)]
    cells = [header, aligned, *rows]
    return ["| " + " | ".join(row) + " |" for row in cells] + [""]


def _about(results: Results) -> list[str]:
    starts = results.of("start")
    if not starts:
        return []
    known = results.one("yardsticks")
    facts: dict[str, Any] = {
        **starts[-1]["identity"], **starts[-1]["conditions"], **known.get("conditions", {}),
    }  # fmt: skip
    dates = dict.fromkeys(start["date"][:10] for start in starts)
    rows = [["date", ", ".join(dates)]]
    rows += [[name.replace("_", " "), str(value)] for name, value in facts.items()]
    if known:
        rates = {
            "memory read": "read", "memory copied, read and written": "copy",
            "pinned copies to the device": "pinned_up",
            "pinned copies to the host": "pinned_down",
        }  # fmt: skip
        rows += [[name, f"{known[f'{key}_bytes_per_s'] / _GB:,.1f} GB/s"]
                 for name, key in rates.items()]  # fmt: skip
        rows.append(["weights read by a step", f"{known['step_weight_bytes'] / _GB:.2f} GB"])
        rows.append(["keys and values of a token", f"{known['kv_bytes_per_token']:,} B"])
    return ["## What made the numbers", "", *_table(["", ""], rows)]


def _arms(results: Results, size: int) -> list[str]:
    """Arms at a length, in the order in which they were searched."""
    return list(dict.fromkeys(
        r["of"]["arm"] for r in results.searches if r["of"]["prompt_tokens"] == size
    ))  # fmt: skip


def _searches(results: Results) -> list[str]:
    lines = [
        "## Searches", "",
        "Steady decoding: without its first quarter, in which kernels are compiled and graphs "
        "captured.  95% intervals over repeats (Student's t).  Floor: how often the step could "
        "have read the weights and the cache from the device's memory.", "",
    ]  # fmt: skip
    header = ["arm", "graphs", "n", "prefill s", "ms per step", "tokens/s", "of full", "floor",
              "policy", "exposed copies", "cache GB", "bytes as simulated"]  # fmt: skip
    for size in results.sizes():
        rows = []
        for arm in _arms(results, size):
            for graphs in MODES:
                row = _search(results, arm, size, graphs)
                rows += [row] if row else []
        lines += [f"### {size:,} prompt tokens", "", *_table(header, rows)]
    return lines if results.searches else []


def _search(results: Results, arm: str, size: int, graphs: str) -> list[str]:
    found = list(results.repeats(arm, size, graphs).values())
    if not found:
        return []
    last = found[-1]

    def mean(name: str) -> Figure:
        return Figure.of([r[name] for r in found])

    of_full = results.ratio(arm, FULL, size, graphs)
    floor_s = results.floor_s(last)
    ran = last.get("step", "eager")
    row = [arm, ran if graphs == "auto" else "off", str(len(found)),
           Figure.of([_prefill_s(r) for r in found]).text(),
           mean("step_s").text("{:.2f}", 1e3), mean("tokens_per_s").text("{:.1f}"),
           of_full.text() if of_full else _NONE,
           f"{mean('step_s').mean / floor_s:.2f}x" if floor_s else _NONE]  # fmt: skip
    if arm in YARDSTICKS:
        return [*row, _NONE, _NONE, f"{last['kv_bytes'] / _GB:.3f}", _NONE]
    equal = last["calls_with_equal_bytes"], last["calls"]
    return [
        *row, mean("policy_share").text("{:.2f}%", 100), mean("exposed_share").text("{:.2f}%", 100),
        f"{sum(last['kv_bytes_at_end'].values()) / _GB:.3f}",
        "all" if equal[0] == equal[1] else f"{equal[0]} of {equal[1]}",
    ]  # fmt: skip


def _prefill_s(record: Facts) -> float:
    return float(record["prefill_s"] if "prefill_s" in record else record["live_s"]["prefill_s"])


def _predictions(results: Results) -> list[str]:
    done = [r for r in results.done if "predicted_s" in r]
    if not done:
        return []
    rows = []
    for r in done:
        of, peak = r["of"], peak_error(r)
        seconds = (r[side]["total_s"] for side in ("predicted_s", "live_s"))
        sizes = (r["predicted_hbm_bytes"] / _GB, r["allocator_peak_bytes"] / _GB)
        rows.append([
            of["arm"], f"{of['prompt_tokens']:,}", of["graphs"], str(of["repeat"]),
            "{:.3f} / {:.3f}".format(*seconds), f"{time_error(r):+.1%}",
            "{:.3f} / {:.3f}".format(*sizes) if sizes[1] else _NONE,
            f"{peak:.1%}" if peak == peak else _NONE,
        ])  # fmt: skip
    header = ["arm", "prompt", "graphs", "repeat", "predicted / real s", "off",
              "predicted / real peak GB", "off"]  # fmt: skip
    said = f"Predictions: {done[-1]['profile']}."
    return ["## Predicted and measured", "", said, "", *_table(header, rows)]


def _smoke(results: Results) -> list[str]:
    found = results.of("smoke")
    if not found:
        return []
    rows = [
        [r["of"]["arm"], r["of"]["graphs"], r["outcome"], f"{r.get('seconds', 0.0):.1f}",
         "yes" if as_simulated(r) else "NO" if r["outcome"] == "done" else _NONE,
         _short(r.get("error") or r.get("why") or "") or _NONE] for r in found
    ]  # fmt: skip
    header = ["arm", "graphs", "outcome", "s", "bytes as simulated", "why"]
    said = (
        f"One of {found[0]['of']['prompt_tokens']:,} prompt tokens each; {RESULTS} has tracebacks."
    )
    return ["## Short searches", "", said, "", *_table(header, rows)]


def _checks(results: Results) -> list[str]:
    checks = results.of("correctness")
    if not checks:
        return []
    names = dict.fromkeys(r["of"]["check"] for r in checks)
    rows = []
    for name in names:
        of = [r for r in checks if r["of"]["check"] == name]
        ok = sum(bool(r.get("ok")) for r in of)
        rest = "; ".join(_wrong(r) for r in of if not r.get("ok"))
        rows.append([name, f"{ok} of {len(of)}", rest or _NONE])
    return ["## Checks of correctness", "", *_table(["check", "ok", "the others"], rows)]


def _wrong(record: Facts) -> str:
    of = ", ".join(str(v) for key, v in record["of"].items() if key != "check")
    why = record.get("why") or record.get("error") or ""
    word = "NOT OK" if record["outcome"] == "done" else record["outcome"]
    return " ".join(filter(None, [of, word, f"({_short(why)})" if why else ""]))


def _traces(results: Results) -> list[str]:
    done = [r for r in results.of("trace") if r["outcome"] == "done"]
    if not done:
        return []
    names = ("launches", "graph_launches", "copies", "waits", "kernels")
    rows = [
        [r["of"]["arm"], f"{r['of']['prompt_tokens']:,}", r["file"] or "too large to keep",
         *(f"{r[name]:,}" for name in names), f"{r['device_s'] * 1e3:.2f}"] for r in done
    ]  # fmt: skip
    header = ["arm", "prompt", "file", *(name.replace("_", " ") for name in names), "device ms"]
    return ["## One step of each", "",
            f"Chrome traces of one decode iteration, in `{TRACES}`, for ui.perfetto.dev.", "",
            *_table(header, rows)]  # fmt: skip


def _contexts(results: Results) -> list[str]:
    found = results.of("context")
    if not found:
        return []

    def tokens(count: Any) -> str:
        return _NONE if count is None else f"{count:,}"

    rows = [
        [r["of"]["what"], tokens(r.get("fits_tokens")), tokens(r.get("fails_tokens")),
         str(r.get("ended", r["outcome"]))] for r in found
    ]  # fmt: skip
    header = ["attention", "fits", "does not fit", "ended by"]
    return ["## Longest prompts", "", *_table(header, rows)]


def _lost(results: Results) -> list[str]:
    """Everything that did not come to its end, with the reason."""
    parts = ("yardsticks", "smoke", "calibration", "search", "trace", "context", "watchdog")
    rows = []
    for r in results.records:
        if r["part"] in parts and r["outcome"] != "done":
            of = ", ".join(f"{value:,}" if isinstance(value, int) else str(value)
                           for value in r.get("of", {}).values())  # fmt: skip
            why = r.get("why") or r.get("asked") or r.get("error") or ""
            if "exit_code" in r:
                why = f"exit code {r['exit_code']}"
            rows.append([r["part"], of or _NONE, r["outcome"], _short(why) or _NONE])
    if not rows:
        return []
    return ["## What did not come to its end", "",
            *_table(["part", "of", "outcome", "why"], rows)]  # fmt: skip


def _short(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "/")[:160]
