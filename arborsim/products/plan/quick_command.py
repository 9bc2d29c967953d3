"""Options of `arborsim plan` that take the place of a workload file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import typer

from arborsim.core.errors import UsageError
from arborsim.core.outputs import check_writable
from arborsim.products.choices import names
from arborsim.products.command import panel
from arborsim.products.equivalent import option_of

_option = panel("Instead of a workload file")


@dataclass(frozen=True)
class QuickOptions:
    """The keywords of `arborsim.products.plan.quick.quick_tables`."""

    model: str | None = _option(
        None, "Geometry to charge for: a name, or a config.json.", complete="model"
    )
    rate: str | None = _option(
        None, "Searches that arrive: 20/min, 0.5/s, 1200/h.", shown="seek the largest"
    )
    p95: str | None = _option(
        None, "Time from arrival to answer that 95% must meet: 60s, 2min.", "--p95"
    )
    p50: str | None = _option(None, "The same for 50%.", "--p50")
    p99: str | None = _option(None, "The same for 99%.", "--p99")
    tree: str | None = _option(
        None,
        "depth=6,width=16,thought=80: levels, thoughts on each, tokens of each; branch=4 are the "
        "children of a thought. 40..160 is a uniform range.",
    )
    chain: str | None = _option(None, "tokens=8000: one chain of thought.")
    trace: str | None = _option(None, "Recorded searches instead.", complete="trace")
    prompt: str | None = _option(None, "Tokens of the prompt.", "--prompt-tokens", shown="500")
    solved: float | None = _option(None, "Share of correct answers.", shown="unknown")
    policies: list[str] = _option(
        [], "By comma.", "--policy", complete="policy", shown="full, kivi, streaming-llm"
    )
    budgets: list[str] = _option(
        [], "Shares (0.5) or tokens (2048), by comma.", "--budget", shown="0.5"
    )
    kv_dtype: str | None = _option(None, "Type of the KV cache.", shown="the model's")
    weights: str | None = _option(None, "Type of the weights.", shown="the model's")
    quick: bool = _option(
        False,
        "Two runs of 200 searches, loads 6% apart, in place of three of 1,000, 2% apart: under a "
        "minute on two cores. Where compared, largest loads were 12% lower to 9% higher.",
        "--quick",
    )
    write: Path | None = _option(
        None, "Write the question as a workload file and end (-: print it).", writes=True
    )

    @property
    def given(self) -> dict[str, Any]:
        """What was asked, as arguments of `arborsim.plan`, and `write`."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in ("policies", "budgets"):
            found[name] = names(found[name])
        return {name: value for name, value in found.items() if value not in (None, [], False)}

    def refuse(self, path: Path) -> None:
        """Refuse them next to a workload file, which answers the same questions."""
        for name in self.given:
            flag = option_of(name)
            raise UsageError(f"{flag} asks without a file: {path} says it itself")

    @property
    def asked(self) -> dict[str, Any]:
        """What was asked, as arguments of `arborsim.plan`."""
        return {name: value for name, value in self.given.items() if name != "write"}

    def tables(self, gpus: Sequence[str]) -> dict[str, Any]:
        """The tables of a workload file that asks the same."""
        from arborsim.products.plan.quick import quick_tables

        asked = self.asked
        if not asked and not gpus:
            raise UsageError(
                "name a workload in TOML; arborsim plan --example prints one. Or ask without one: "
                "--model llama-3.1-8b --gpu l40s,h100 --rate 20/min --p95 60s "
                "--tree depth=6,width=16,thought=80"
            )
        for flag, there in (("--model", self.model), ("--gpu", gpus)):
            if not there:
                raise UsageError(f"{flag} is missing: without a workload file, a plan needs it")
        return quick_tables(gpus=gpus, **asked)

    def save(self, tables: dict[str, Any]) -> None:
        """Write the workload file; its paths start from its own folder."""
        from arborsim.core.outputs import write_text
        from arborsim.products.plan.quick import quick_toml

        assert self.write is not None
        if str(self.write) == "-":
            typer.echo(quick_toml(tables), nl=False)
            return
        check_writable(self.write, "--write")
        for entry in tables["mix"]:
            if "trace" in entry:
                entry["trace"] = os.path.relpath(entry["trace"], self.write.parent)
        write_text(self.write, quick_toml(tables))
        typer.echo(f"wrote {self.write}: arborsim plan {self.write}")
