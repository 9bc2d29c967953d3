"""`arborsim hardware`: list the machines, explain one number by number, import measured ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from arborsim.products.declare import Option, Written
from arborsim.products.options import Json, check_profile, print_json

if TYPE_CHECKING:
    from rich.console import Console

    from arborsim.machine.lookup import Prices
    from arborsim.machine.profile import HardwareProfile


def hardware(
    name: Annotated[str, Option(complete="gpu")] = "",
    *,
    host: Annotated[str, Option(complete="host")] = "",
    prices: Path | None = None,
    json: Json = False,
) -> None:
    """List the GPUs and hosts, or explain one: every number with unit, source and date.

    Parameters
    ----------
    name
        One GPU, in detail: a name or TOML file.
    host
        Put the GPU into this host: a name or file.
    prices
        Your prices: a TOML file like the shipped one.
    json
        Print JSON instead of tables.
    """
    from arborsim.machine.lookup import load_prices, load_profile, profile_names
    from arborsim.report.table import terminal

    priced = load_prices(prices)
    found = [load_profile(one, host or None) for one in ([name] if name else profile_names())]
    console = terminal()
    if json:
        documents = [_document(profile, priced) for profile in found]
        print_json(documents[0] if name else documents)
    elif name:
        _explain(console, found[0], priced)
    else:
        _list(console, found, priced, host)


def import_(
    source: Literal["aiconfigurator"],
    *,
    gpu: str,
    engine: str,
    out: Annotated[Written | None, Option(shown="GPU-ENGINE.toml")] = None,
    overwrite: bool = False,
) -> None:
    """Import measured kernels of a GPU and an engine, as a profile.

    Needs the extra `kernels`.

    Parameters
    ----------
    source
        Where the times are from: PyPI's aiconfigurator-core.
    gpu
        The GPU, as the source calls it: b200_sxm.
    engine
        The inference engine: vllm, sglang, trtllm.
    out
        The profile to make. The tables lie next to it.
    overwrite
        Replace both files.
    """
    from arborsim.machine.aiconfigurator import read, write_profile
    from arborsim.report.table import print_list, terminal

    if out is not None:
        check_profile(out, overwrite, ".parquet")
    found = read(gpu, engine)
    if out is None:
        check_profile(out := Path(f"{found.gpu}-{engine}.toml"), overwrite, ".parquet")
    tables = write_profile(found, out)
    rows = []
    for table, version in found.versions.items():
        of_type = {kind: len(each) for (name, kind), each in found.tables.items() if name == table}
        rows.append([table, ", ".join(of_type), f"{sum(of_type.values()):,}", version])
    print_list(terminal(), ["table", "types", "rows", engine], rows)
    megabytes = tables.stat().st_size / 1e6
    print(f"\n{found.header['source']}, {found.header['licence']}")
    use = f"arborsim replay TRACE --gpu {out} --engine {engine}"
    print(f"wrote {out} and {tables} ({megabytes:.2f} MB): {use}")


SUBCOMMANDS = {"import": import_}


def _document(profile: HardwareProfile, prices: Prices) -> dict[str, Any]:
    from dataclasses import asdict

    from arborsim.machine.numbers import numbers_of

    price = prices.of(profile.name)
    said = {name: getattr(prices, name) for name in ("currency", "date", "source")}
    return {
        "name": profile.name,
        "numbers": [asdict(number) for number in numbers_of(profile)],
        "kernels": _kernels(profile),
        "price_per_hour": {"low": price[0], "high": price[1], **said} if price else None,
    }


def _kernels(profile: HardwareProfile) -> dict[str, str]:
    """Versions of the engines whose kernels were measured on the GPU, by name."""
    from arborsim.machine.kernels import load_tables, shipped_tables

    paths = [path for (gpu, _), path in sorted(shipped_tables().items()) if gpu == profile.kernels]
    if profile.kernels.endswith(".parquet"):
        paths = [Path(profile.kernels)]
    tables = [load_tables(path) for path in paths]
    return {each.engine: ", ".join(sorted(set(each.versions.values()))) for each in tables}


def _list(console: Console, found: Sequence[HardwareProfile], prices: Prices, host: str) -> None:
    """A line per GPU, and a line per host. What is assumed has a question mark."""
    from arborsim.machine.lookup import host_names, load_host
    from arborsim.machine.numbers import numbers_of
    from arborsim.report.table import print_list
    from arborsim.report.words import plain

    columns = {
        "hbm_bytes": ("memory\nGB", 1e9, 1),
        "hbm_bytes_per_s": ("GB/s", 1e9, 0),
        "flops_per_s": ("TFLOP/s", 1e12, 0),
        "h2d_bytes_per_s": ("PCIe\nGB/s", 1e9, 0),
    }
    hosts = [load_host(name) for name in ([host] if host else host_names())]
    if host:
        console.print(f"Each GPU in host {hosts[0].name}:", style="bold", markup=False)
    rows = []
    for profile in found:
        name = profile.name.removesuffix(f"+{hosts[0].name}") if host else profile.name
        figures = [
            f"{getattr(profile, key) / size:.{digits}f}" + "?" * profile.is_assumed(key)
            for key, (_, size, digits) in columns.items()
        ]
        assumed = f"{len(profile.assumed())} of {len(numbers_of(profile))}"
        rows.append([name, *figures, assumed, _price(profile.name, prices)])
    heads = [head for head, _, _ in columns.values()]
    print_list(console, ["GPU", *heads, "assumed", f"{plain(prices.currency)}/h"], rows)
    console.print()
    parts = ("ddr_bytes", "ddr_bytes_per_s", "h2d_bytes_per_s")
    rows = [[host.name, *(f"{getattr(host, part) / 1e9:.0f}" for part in parts)] for host in hosts]
    print_list(console, ["host", "DDR\nGB", "GB/s", "PCIe\nGB/s"], rows)
    for note in (
        "",
        "? and the column assumed: numbers that are neither published nor measured. GB is 1e9 "
        "bytes; PCIe is what large pinned blocks reach in one direction.",
        f"Prices: {plain(prices.source)}, {plain(prices.date)}; --prices FILE takes yours.",
        "`arborsim hardware NAME` explains one; `--host` puts it into a host; `--json` prints "
        "everything.",
    ):
        console.print(note, style="dim", markup=False)


def _price(gpu: str, prices: Prices) -> str:
    price = prices.of(gpu)
    if price is None:
        return "-"
    return f"{price[0]:.2f}" if price[0] == price[1] else f"{price[0]:.2f}-{price[1]:.2f}"


def _explain(console: Console, profile: HardwareProfile, prices: Prices) -> None:
    from rich.text import Text

    from arborsim.machine.numbers import numbers_of
    from arborsim.report.table import grid
    from arborsim.report.words import plain

    console.print(Text(plain(profile.name), style="bold"))
    rows = []
    for each in numbers_of(profile):
        source = each.source, "yellow" if each.assumed else "dim"
        rows.append((each.name, each.text, Text.assemble(each.about, "\n", source)))
    console.print(grid(rows, ("number", "value", "what it is, and where it is from")))
    if kernels := _kernels(profile):
        measured = "; ".join(f"{name}: {versions}" for name, versions in kernels.items())
        console.print(Text(f"\nMeasured kernels by --engine: {measured}"))
    gpu = profile.name.partition("+")[0]
    if prices.of(profile.name):
        shown = f"{_price(profile.name, prices)} {plain(prices.currency)} per hour"
        note = f"; {plain(prices.notes[gpu])}" if gpu in prices.notes else ""
        console.print(Text(f"\n{shown}: {plain(prices.source)}, {plain(prices.date)}{note}"))
    text = (
        f"\n{len(profile.assumed())} of {len(numbers_of(profile))} numbers are assumed. `arborsim "
        f'calibrate hardware` measures them; a TOML file with base = "{gpu}" changes single ones.'
    )
    console.print(Text(text, style="dim"))
