"""`arborsim plan --explain`: one candidate's memory, and every term of a search's time."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from arborsim.core.units import scale_for
from arborsim.plan.results import CandidateResult, LoadPoint
from arborsim.show.words import plain


def print_explained(candidate: CandidateResult, console: Console | None = None) -> None:
    """Print how the memory for the cache comes about, and every term of a search's time."""
    console = console or Console(highlight=False)
    console.print()
    console.print(Text(f"{plain(candidate.name)}", style="bold"))
    if candidate.pool is not None:
        pool = candidate.pool
        gb = [f"{each / 1e9:.2f} GB" for each in (
            pool.hbm_bytes, pool.reserve_bytes, pool.weight_bytes, pool.workspace_bytes,
            pool.kv_bytes)]  # fmt: skip
        console.print(
            f"memory for keys and values: {gb[0]} - {gb[1]} reserve - {gb[2]} weights - "
            f"{gb[3]} workspace = {gb[4]}"
        )
    if candidate.alone is None:
        return
    alone = candidate.alone
    console.print(
        f"a search alone, on average: {alone.prompt_tokens:,.0f} prompt and "
        f"{alone.generated_tokens:,.0f} generated tokens, at most "
        f"{alone.peak_hbm_bytes / 1e9:.3f} GB of HBM and {alone.peak_ddr_bytes / 1e9:.3f} GB of DDR"
    )
    unit = scale_for("seconds", [alone.seconds / 1000])
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("  term", no_wrap=True)
    for name in (unit.unit, "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, seconds in alone.terms_s.items():
        if seconds:
            share = f"{seconds / alone.seconds:.1%}" if alone.seconds else "-"
            table.add_row(f"  {name}", f"{seconds / unit.size:,.{unit.decimals}f}", share)
    table.add_row("  total", unit.show(alone.seconds), "100.0%", style="bold")
    console.print(table)
    if candidate.at_largest is not None:
        _print_busy(console, candidate.at_largest)


def _print_busy(console: Console, point: LoadPoint) -> None:
    """Where the machine's time goes at the largest load."""
    busy = point.busy
    parts = {
        "prefill": busy.prefill_s, "recomputing": busy.recompute_s, "decoding": busy.decode_s,
        "policies": busy.policy_s, "waiting for transfers": busy.exposed_s,
        "idle": max(0.0, point.total_s - busy.total_s),
    }  # fmt: skip
    shares = [f"{name} {100 * part / point.total_s:.1f}%" for name, part in parts.items() if part]
    console.print(f"at the largest load the machine's time goes into {', '.join(shares)}")
