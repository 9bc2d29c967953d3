"""`arborsim inspect`: the content of a trace in a terminal, a screen of it or everything."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from arborsim.core.documents import strict
from arborsim.products.declare import Count, Option, Positive
from arborsim.products.options import Json, print_json
from arborsim.products.traces.describe import SPREADS, Description, describe, draw_tree, escaped
from arborsim.report.table import grid, terminal
from arborsim.trace.reader import TraceReader, open_trace

if TYPE_CHECKING:
    from rich.console import Console, Group

_WIDE = 150
#: Lines of the short form, and those of it around the thoughts of its tree.
_LINES = 38
#: Statistics that the short form shows, and most thoughts of its tree.
_TOKENS = ("prompt_tokens", "generated_tokens", "longest_path_tokens")
_FEW = (*_TOKENS, "nodes", "depth", "branching")
_FEW_NODES = 8
#: What `--all` draws unless options say otherwise.
_EPISODES, _NODES = 2, 24
#: Characters of one fact: a whole command, but not the names of thousands of damaged items.
_LONGEST = 2000


def inspect(
    trace: Annotated[Path, Option(complete="trace")],
    *,
    all: bool = False,
    episodes: Annotated[Count | None, Option(shown="1, with --all 2")] = None,
    nodes: Annotated[Positive | None, Option(shown="those that fit, with --all 24")] = None,
    json: Json = False,
) -> None:
    """Show what a trace holds: its model and search, its sizes, and what can replay it.

    Parameters
    ----------
    trace
        A trace file, or the .parts of a recording.
    all
        Also how it was made, sizes per column, each policy, more trees.
    episodes
        Episodes whose tree is drawn.
    nodes
        Most nodes per tree.
    json
        Print JSON instead of tables.
    """
    reader = open_trace(trace)
    found = describe(reader)
    if json:
        print_json(strict(found))
    else:
        print_trace(reader, found, everything=all, episodes=episodes, nodes=nodes)


def print_trace(
    reader: TraceReader,
    found: Description,
    console: Console | None = None,
    *,
    everything: bool = False,
    episodes: int | None = None,
    nodes: int | None = None,
) -> None:
    """Print a screen about a trace, or `everything`, and the trees of some `episodes`.

    A tree has at most `nodes` nodes.
    """
    console = console or terminal()
    unicode = console.encoding.startswith("utf")
    if everything:
        _show_tables(console, found, unicode)
        episodes, nodes = _EPISODES if episodes is None else episodes, nodes or _NODES
    else:
        with console.capture() as shown:
            _show_short(console, found, unicode)
        console.file.write(shown.get())
        room = _LINES - shown.get().count("\n") - 5  # of which a tree takes others
        episodes, nodes = (
            1 if episodes is None else episodes,
            nodes or min(max(room, 2), _FEW_NODES),
        )
    for episode in reader.episodes(text=True, stop=episodes):
        facts = found.episodes[episode.index]
        verdict = {None: "not judged", True: "correct", False: "wrong"}[facts.correct]
        _line(
            console,
            f"\nEpisode {episode.index}: {facts.nodes} nodes, "
            f"{facts.prompt_tokens}+{facts.generated_tokens} tokens, answer {verdict}"
            " (* is the path to it)",
            style="bold",
        )
        for line in draw_tree(episode, nodes, unicode):
            _line(console, line, whole=everything)
        answer = episode.text[-1] if episode.text else None
        if facts.answered and answer:
            _line(console, f"answer: {escaped(answer, unicode)}", whole=everything)
    if not everything:
        _line(console, "\nHow it was made, sizes per column, all signals: --all")


def _show_short(console: Console, found: Description, unicode: bool) -> None:
    """Where the trace comes from, its sizes, and which policies it can serve."""
    info, facts = found.info, _facts(found)
    few = {
        "file": facts["file"],
        "model": facts["model"],
        "task": f"{facts['task']}, search {info.search}",
        "imported from": facts.get("imported from"),
        "unknown": facts.get("unknown"),
        "recorded": f"capture {info.capture}, attention {facts['attention']}",
        "accuracy": facts["accuracy"],
    }
    console.print(_pairs(found, few, unicode))
    console.print(_statistics(found, _FEW))
    missing: dict[str, list[str]] = {}
    for fit in found.policies:
        missing.setdefault(fit.remedy, []).append(fit.name)
    able = missing.pop("", [])
    _wrapped(console, f"{len(able)} of {len(found.policies)} policies can be replayed", able)
    for remedy, names in missing.items():
        _wrapped(console, f"{len(names)} more: {remedy}", names)


def _wrapped(console: Console, title: str, names: Sequence[str]) -> None:
    """A title and names on lines of whole words."""
    text = f"{title}: {', '.join(names)}" if names else title
    wrap = textwrap.TextWrapper(console.width - 1, subsequent_indent="  ", break_on_hyphens=False)
    for line in wrap.wrap(text):
        _line(console, line)


def _line(console: Console, text: str, style: str = "", whole: bool = False) -> None:
    """One line of the terminal, cut unless it shall be whole. Never read as markup."""
    from rich.text import Text

    cut: dict[str, Any] = {} if whole else {"no_wrap": True, "overflow": "crop"}
    console.print(Text(text, style=style), **cut)


def _show_tables(console: Console, found: Description, unicode: bool) -> None:
    from rich.table import Column, Table

    tables = (
        _pairs(found, _facts(found), unicode),
        _statistics(found),
        _sizes(found),
        _policies(found),
    )
    if console.width < _WIDE:
        for table in tables:
            console.print(table)
        return
    half = (console.width - 2) // 2
    grid = Table.grid(Column(width=half), Column(width=half), padding=(0, 1))
    for left, right in zip(tables[::2], tables[1::2], strict=True):
        grid.add_row(left, right)
    console.print(grid)


def _table(
    title: str, rows: Iterable[Sequence[Any]], heads: Sequence[str] = (), *, numbers: bool = False
) -> Group:
    """A titled table of texts, or of numbers after a first column of text."""
    from rich.console import Group
    from rich.text import Text

    right = range(1, len(heads)) if numbers else ()
    return Group(Text(title, style="italic"), grid(list(rows), heads, right=right), "")


def _facts(found: Description) -> dict[str, Any]:
    """How the trace was made."""
    info, geometry, right = found.info, found.info.geometry, found.accuracy
    top = f", top {info.attention_top} positions per row" if info.attention == "sparse" else ""
    layers = ", ".join(map(str, info.attention_layer_ids))
    pairs = {
        "file": found.file,
        "model": f"{info.model} ({geometry.layers} layers, {geometry.heads} heads, "
        f"{geometry.kv_heads} KV heads of {geometry.head_dim})",
        "task": info.task,
        "search": f"{info.search} {_options(info.search_parameters)}".strip(),
        "seed": info.seed,
        "capture": info.capture,
        "attention": info.attention + top,
        "attention layers": f"{layers} (mean and variance over heads)" if layers else "",
        "hidden layers": ", ".join(map(str, info.hidden_layers)),
        "signals": ", ".join(found.signals),
        "accuracy": right
        and f"{right.correct}/{right.judged} = {right.correct / right.judged:.3f} "
        f"(95% Clopper-Pearson {right.low:.3f} to {right.high:.3f})",
        "tokenizer": info.tokenizer,
        "device": info.device,
        "software": _options(info.software),
        "timing": _options(info.timing),
        "command": info.command,
    }
    extra, left_out = info.extra, info.extra.get("left_out")
    if "source_format" in extra:  # made of another's recording
        pairs |= {
            "imported from": f"{extra.get('source')} ({extra['source_format']})",
            "lengths": extra.get("lengths"),
            "unknown": "token ids, times" + ("" if info.knows_ends else ", which thoughts ended"),
            "left out": "; ".join(map(str, left_out)) if isinstance(left_out, list) else None,
        }
    return pairs


def _pairs(found: Description, pairs: dict[str, Any], unicode: bool) -> Group:
    """Names and facts. What is empty or unknown is left out."""
    from rich.text import Text

    # The file is not trusted: its strings must not steer the terminal or rich.
    rows = [
        (name, Text(escaped(str(value), unicode, _LONGEST)))
        for name, value in pairs.items()
        if value not in ("", None)
    ]
    return _table(f"{found.num_episodes} episodes, {_size(found.file_bytes)}", rows)


def _options(values: dict[str, Any]) -> str:
    shown = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in values.items()}
    return ", ".join(f"{key}={value}" for key, value in shown.items())


def _statistics(found: Description, names: Sequence[str] = ()) -> Group:
    """The spreads of these names, of all if there are none."""
    rows: list[tuple[str, ...]] = []
    for name, label in SPREADS.items():
        if names and name not in names:
            continue
        spread = found.spreads.get(name)
        if spread is None:
            rows.append((label, "unknown"))
            continue
        total = "" if name in ("depth", "branching", "longest_path_tokens") else spread.total
        numbers = (total, spread.smallest, spread.median, spread.mean, spread.largest)
        rows.append((label, *map(_number, numbers)))
    heads = ("", "total", "least", "median", "mean", "most")
    return _table("Per episode", rows, heads, numbers=True)


def _number(value: float | str) -> str:
    if isinstance(value, str):
        return value
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.1f}" if value >= 100 else f"{value:.3g}"


def _sizes(found: Description) -> Group:
    tokens = found.spreads["prompt_tokens"].total + found.spreads["generated_tokens"].total
    whole = sum(column.stored_bytes for column in found.columns) or 1
    rows = [
        (
            column.name,
            _size(column.stored_bytes),
            f"{column.stored_bytes / whole:.1%}",
            f"{column.stored_bytes / tokens:.2f}",
            f"{column.stored_bytes / max(column.unpacked_bytes, 1):.0%}",
        )
        for column in found.columns
    ]
    heads = ("column", "stored", "share", "bytes/token", "packed to")
    return _table("Size per column", rows, heads, numbers=True)


def _size(size_bytes: float) -> str:
    """Decimal units: 1 GB is 1e9 bytes."""
    for unit in ("B", "kB", "MB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.2f} GB"


def _policies(found: Description) -> Group:
    rows = [
        (fit.name, "no", f"{', '.join(fit.missing)}: {fit.remedy}")
        if fit.missing
        else (fit.name, "yes", "")
        for fit in found.policies
    ]
    return _table("Policies this trace can serve", rows, ("policy", "", "what is missing"))
