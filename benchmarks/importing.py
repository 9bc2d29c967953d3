"""How fast recordings in other formats become traces: items per second of the processor, and sizes.

    python benchmarks/importing.py [--requests 20000] [--log FORMAT=FILE ...]

Without logs, requests with lengths and prefix blocks drawn at random are imported in each format of
requests, and the sample trees of ``traces/logs``.  `first` is the time to open the trace and read
its first 100 episodes.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from arborsim.machine.lookup import load_geometry
from arborsim.trace.importers.request_logs import FORMATS, read_requests
from arborsim.trace.importers.sources import (
    Contents,
    Description,
    read_list,
    trace_info,
    write_trace,
)
from arborsim.trace.importers.tot import TotLog
from arborsim.trace.importers.trees import deft_search
from arborsim.trace.reader import TraceReader

LOGS = Path(__file__).resolve().parents[1] / "traces" / "logs"


def made_up(format: str, count: int, folder: Path) -> Path:
    """A log of requests with prompts of up to 20,000 tokens and answers of up to 800."""
    rng = random.Random(0)
    lines = [] if FORMATS[format].block_tokens else [",".join(FORMATS[format].needs)]
    block = FORMATS[format].block_tokens
    for number in range(count):
        prompt, answer = rng.randint(100, 20_000), rng.randint(1, 800)
        if block:
            ids = [rng.randrange(10**7) for _ in range(-(-prompt // block))]
            lines.append(json.dumps({"timestamp": number, "input_length": prompt,
                                     "output_length": answer, "hash_ids": ids}))  # fmt: skip
        else:
            minute, second = divmod(number % 3600, 60)
            lines.append(f"2023-11-16 18:{minute:02}:{second:02}.5,{prompt},{answer}")
    path = folder / f"log.{format}"
    path.write_text("\n".join(lines))
    return path


def read(path: Path, format: str) -> Contents:
    if format in FORMATS:
        return read_requests(path, format)
    return read_list(path, TotLog().search_of if format == "tot" else deft_search)


def timed(format: str, path: Path, out: Path) -> str:
    """A line of the table."""
    begun = time.process_time()
    contents = read(path, format)
    found = time.process_time()
    block = {"prefix_block_tokens": FORMATS[format].block_tokens} if format in FORMATS else {}
    about = Description(format, "benchmark", "", "", {}, block)
    info = trace_info(path, about, contents, load_geometry("llama-3.1-8b"))
    write_trace(contents, info, out, overwrite=True)
    written = time.process_time()
    first = sum(1 for _ in islice(TraceReader(out).episodes(), 100))
    opened = time.process_time()
    count, tokens = len(contents.searches), sum(each.num_tokens for each in contents.searches)
    return (
        f"{format:10s} {count:8,d} {tokens / 1e6:9.1f} {found - begun:7.2f} {written - found:7.2f} "
        f"{count / (written - begun):9,.0f} {out.stat().st_size / 1e6:7.2f} {opened - written:7.2f}"
        f" ({first})"
    )


def logs(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Path]]:
    if options.log:
        for given in options.log:
            format, _, path = given.partition("=")
            yield format, Path(path)
        return
    for format in ("mooncake", "bailian", "azure"):
        yield format, made_up(format, options.requests, folder)
    yield from (("tot", LOGS / "tot.json"), ("deft", LOGS / "deft.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--log", action="append", metavar="FORMAT=FILE")
    options = parser.parse_args()
    print("format        items  M tokens  read, s write, s   items/s      MB  first, s")
    with tempfile.TemporaryDirectory() as folder:
        for format, path in logs(options, Path(folder)):
            print(timed(format, path, Path(folder) / "out.parquet"), flush=True)


if __name__ == "__main__":
    main()
