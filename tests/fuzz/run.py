"""Run damaged inputs through the command line, and say what went wrong.

``python -m tests.fuzz.run --cases 10000`` runs the cases 0 to 9,999; each depends on its number
alone, so that ``--first 4711 --cases 1 --verbose`` runs one of them again.  ``--no-models`` passes
over those that need torch.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from arborsim.cli.app import main
from arborsim.products.sweep.cells import sealed
from tests.fuzz import corpus, damage
from tests.fuzz.corpus import Target

#: Seconds of processor time that a case may take, and memory on top of what is loaded.
MOST_S, MOST_BYTES = 30.0, 3 << 30
_PRINTED = {"\n", "\t"}
_MEMORY = re.compile(
    r"out of memory|(cannot|unable to|failed to) allocate|malloc of", re.IGNORECASE
)
_DIGEST = re.compile(r"sha256 [0-9a-f]+")  # of a file of which not all was read


class Hang(BaseException):
    """A case takes longer than any should."""


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    code: int | None  # None if it did not return one
    out: str
    err: str
    escaped: str = ""  # what it raised


@dataclass(frozen=True)
class Case:
    """A damaged input."""

    number: int
    target: Target
    what: str
    data: bytes
    harmless: bool


def case(number: int, targets: list[Target], good: dict[str, bytes]) -> Case:
    """One of the cases; every target has as many."""
    target = targets[number % len(targets)]
    rng = random.Random(f"case {number}")
    if rng.random() < 0.04:
        data = damage.harmless(good[target.name], target.kind, rng)
        return Case(number, target, "nothing that matters", data, True)
    what, data = damage.damaged(good[target.name], target.kind, rng)
    if target.name == "cell" and rng.random() < 0.8:  # what its digest would not let through
        data = sealed(data)
    return Case(number, target, what, data, data == good[target.name])


def run(command: tuple[str, ...]) -> Ran:
    """The command, in this process, with what it prints and whatever it raises."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    code, escaped = None, ""
    signal.signal(signal.SIGPROF, _hang)
    signal.setitimer(signal.ITIMER_PROF, MOST_S)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(list(command))
    except BaseException:
        escaped = traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    said = [stream.buffer.getvalue().decode("utf-8", "replace") for stream in (out, err)]
    return Ran(code, _DIGEST.sub("sha256 -", said[0]), said[1], escaped)


def _hang(number: int, frame: FrameType | None) -> None:
    raise Hang


def problems(made: Case, ran: Ran, good: Ran) -> Iterator[str]:
    """What the command must not do."""
    if ran.escaped:
        yield f"raised {ran.escaped}"
        return
    if ran.code not in (0, 2) and (ran.code, made.target.command[0]) != (1, "sweep"):
        yield f"exit code {ran.code}"
    strange = {c for c in ran.out + ran.err if not c.isprintable() and c not in _PRINTED}
    if strange - {" "} and any(ord(c) < 32 or 127 <= ord(c) < 160 for c in strange):
        yield f"printed {sorted(strange)}"
    if ran.code == 2:
        lines = ran.err.splitlines()
        if len(lines) != 1 or not lines[0].startswith("arborsim: "):
            yield f"says {len(lines)} lines of error: {ran.err[:300]!r}"
        if "damaged" in ran.err and _MEMORY.search(ran.err):
            yield f"calls too little memory damage: {ran.err[:300]!r}"
    if ran.code == 0 and "--json" in made.target.command:
        try:
            json.loads(ran.out, parse_constant=_no_json)
        except ValueError as error:
            yield f"printed no JSON: {error}"
    if made.harmless and (ran.code, ran.out) != (good.code, good.out):
        yield f"differs although nothing changed: {ran.code} {ran.err[:300]!r}"


def _no_json(word: str) -> None:
    raise ValueError(word)


def in_pages(made: Case, good: bytes) -> bool:
    """Whether only bytes before the footer were changed, none added: checksums tell of those.

    Those of a file that was written anew are right.
    """
    if made.target.kind != "parquet" or len(made.data) != len(good) or "values" in made.what:
        return False
    footer = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
    return made.data[footer:] == good[footer:] and made.data[:4] == good[:4]


def run_cases(folder: Path, first: int, count: int, only: str, models: bool, verbose: bool) -> int:
    """Run them, print what was found as JSON, and return how many went wrong."""
    targets = [each for each in corpus.make(folder, models) if only in each.name]
    wanted = [each for each in targets if models or not each.models]
    good = {each.name: each.file.read_bytes() for each in wanted}
    made_of = {}
    for each in wanted:
        made_of[each.name] = run(_filled(each, folder))
        _forget(folder)
    if bad := [(name, ran) for name, ran in made_of.items() if ran.code != 0]:
        raise AssertionError(bad)
    _forget(folder)
    before = _inputs(folder)
    _limit_memory()
    codes: Counter[str] = Counter()
    found = []
    for number in range(first, first + count):
        if targets[number % len(targets)] not in wanted:
            codes["skipped"] += 1
            continue
        made = case(number, targets, good)
        made.target.file.write_bytes(made.data)
        (folder / "now").write_text(ascii((number, made.target.name, made.what)))
        ran = run(_filled(made.target, folder))
        wrong = list(problems(made, ran, made_of[made.target.name]))
        if made.target.file.read_bytes() != made.data:
            wrong.append("changed its input")
        same = ran.out == made_of[made.target.name].out
        if ran.code == 0 and in_pages(made, good[made.target.name]) and not same:
            wrong.append("took damaged pages for good ones")
        _forget(folder)
        made.target.file.write_bytes(good[made.target.name])
        codes["refused" if ran.code else "the same" if same else "read"] += 1
        if verbose:
            print(made.target.command, made.what, ran, sep="\n")
        for each in wrong:
            found.append({"case": number, "target": made.target.name, "damage": made.what,
                          "problem": each})  # fmt: skip
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    if _inputs(folder) != before:
        found.append({"problem": "other files changed"})
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(json.dumps({"cases": count, **codes, "peak_mib": peak, "problems": found}))
    return len(found)


def _filled(target: Target, folder: Path) -> tuple[str, ...]:
    """The command line, when what it goes on with is in its place."""
    out = str(folder / "out")
    if target.copy:
        shutil.copy(target.file, target.copy.replace("{out}", out))
    return tuple(each.replace("{out}", out) for each in target.command)


def _forget(folder: Path) -> None:
    """Delete what a command made."""
    for path in folder.glob("out*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _inputs(folder: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.name != "now" and path.is_file()
    }


def _limit_memory() -> None:
    status = Path("/proc/self/status").read_text()
    used = 1024 * int(status.split("VmSize:")[1].split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, hard))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--only", default="", help="part of a target's name")
    parser.add_argument("--no-models", action="store_true", help="skip what needs torch")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        wrong = run_cases(given.folder or Path(scratch), given.first, given.cases, given.only,
                          not given.no_models, given.verbose)  # fmt: skip
    sys.exit(bool(wrong))
