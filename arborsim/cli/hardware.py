"""`arborsim hardware`: list the machines, or explain one number by number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborsim.cli.command import argument, command, option
from arborsim.cli.options import json_option, print_json

if TYPE_CHECKING:
    from rich.console import Console

    from arborsim.machine.lookup import Prices
    from arborsim.machine.profile import HardwareProfile


@command
def hardware(
    name: str = argument("", "One GPU, in detail: a name or TOML file.", complete="gpu"),
    host: str = option("", "Put the GPU into this host: a name or file.", complete="host"),
    prices: Path | None = option(None, "Your prices: a TOML file like the shipped one."),
    json: bool = json_option(),
) -> None:
    """List the GPUs and hosts, or explain one: every number with unit, source and date."""
    from rich.console import Console

    from arborsim.machine.lookup import load_prices, load_profile, profile_names

    priced = load_prices(prices)
    found = [load_profile(one, host or None) for one in ([name] if name else profile_names())]
    console = Console(highlight=False)
    if json:
        documents = [_document(profile, priced) for profile in found]
        print_json(documents[0] if name else documents)
    elif name:
        _explain(console, found[0], priced)
    else:
        _list(console, found, priced, host)


def _document(profile: HardwareProfile, prices: Prices) -> dict[str, Any]:
    from dataclasses import asdict

    from arborsim.machine.profile import numbers_of

    price = prices.of(profile.name)
    return {
        "name": profile.name,
        "numbers": [asdict(number) for number in numbers_of(profile)],
        "price_per_hour": {
            "low": price[0], "high": price[1], "currency": prices.currency, "date": prices.date,
            "source": prices.source,
        } if price else None,
    }  # fmt: skip


def _list(console: Console, found: Sequence[HardwareProfile], prices: Prices, host: str) -> None:
    """A line per GPU, and a line per host; what is assumed has a question mark."""
    from arborsim.machine.lookup import host_names, load_host
    from arborsim.show.table import print_list

    columns = {
        "hbm_bytes": ("memory\nGB", 1e9, 1), "hbm_bytes_per_s": ("GB/s", 1e9, 0),
        "flops_per_s": ("TFLOP/s", 1e12, 0), "h2d_bytes_per_s": ("PCIe\nGB/s", 1e9, 0),
    }  # fmt: skip
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
        assumed = f"{len(profile.assumed())} of {len(profile.numbers())}"
        rows.append([name, *figures, assumed, _price(profile.name, prices)])
    heads = [head for head, _, _ in columns.values()]
    print_list(console, ["GPU", *heads, "assumed", f"{prices.currency}/h"], rows)
    console.print()
    rows = [
        [host.name, f"{host.ddr_bytes / 1e9:.0f}", f"{host.ddr_bytes_per_s / 1e9:.0f}",
         f"{host.h2d_bytes_per_s / 1e9:.0f}"]
        for host in hosts
    ]  # fmt: skip
    print_list(console, ["host", "DDR\nGB", "GB/s", "PCIe\nGB/s"], rows)
    for note in (
        "",
        "? and the column assumed: numbers that are neither published nor measured. GB is 1e9 "
        "bytes; PCIe is what large pinned blocks reach in one direction.",
        f"Prices: {prices.source}, {prices.date}; --prices FILE takes yours.",
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

    from arborsim.machine.profile import numbers_of
    from arborsim.show.table import grid

    console.print(Text(profile.name, style="bold"))
    rows = [
        (each.name, each.text,
         Text.assemble(each.about, "\n", (each.source, "yellow" if each.assumed else "dim")))
        for each in numbers_of(profile)
    ]  # fmt: skip
    console.print(grid(rows, ("number", "value", "what it is, and where it is from")))
    gpu = profile.name.partition("+")[0]
    if prices.of(profile.name):
        shown = f"{_price(profile.name, prices)} {prices.currency} per hour"
        note = f"; {prices.notes[gpu]}" if gpu in prices.notes else ""
        console.print(Text(f"\n{shown}: {prices.source}, {prices.date}{note}"))
    text = (
        f"\n{len(profile.assumed())} of {len(profile.numbers())} numbers are assumed. `arborsim "
        f'calibrate hardware` measures them; a TOML file with base = "{gpu}" changes single ones.'
    )
    console.print(Text(text, style="dim"))
