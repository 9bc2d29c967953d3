"""Options that say, or change, which workload a plan is made for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

from arborsim.products import choices
from arborsim.products.declare import AnyPath, Count, Option, Options, Positive, listed
from arborsim.products.options import Calibrations

if TYPE_CHECKING:
    from arborsim.products.plan.workload import Workload


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions(Options):
    """Options that replace what the workload says.

    Parameters
    ----------
    gpus
        GPUs by comma, in place of the workload's: names, or TOML files with numbers of the machine;
        repeatable.
    load
        Size a fleet for this load.
    calibration
        Settings of policies from a calibration, a file or name, where the workload gives none;
        repeatable.
    allow_code
        Import policies that the workload file names as package.module:Class.
    searches
        Searches per run, in place of the workload's.
    warm_up
        Searches before anything is measured, in place of the workload's.
    runs
        Runs per load, in place of the workload's.
    """

    gpus: Annotated[str | Sequence[str], Option("gpu", complete="gpu")] = ()
    load: Annotated[float | None, Option(shown="the workload's")] = None
    calibration: Calibrations = ()
    allow_code: bool = False
    searches: Annotated[Positive | None, Option(panel="Run")] = None
    warm_up: Annotated[Count | None, Option(panel="Run")] = None
    runs: Annotated[Positive | None, Option(panel="Run")] = None

    def resized(self, workload: Workload) -> Workload:
        """A workload with another load, or other runs, where they are given."""
        if self.load is not None:
            workload = workload.with_load(self.load)
        searches, warm_up, runs = self.searches, self.warm_up, self.runs
        if (searches, warm_up, runs) == (None, None, None):
            return workload
        searches = workload.searches if searches is None else searches
        warm_up = min(workload.warm_up, searches // 10) if warm_up is None else warm_up
        return workload.with_run_length(searches, warm_up, workload.runs if runs is None else runs)


@dataclass(frozen=True, kw_only=True)
class QuickOptions(Options, panel="Instead of a workload file"):
    """The keywords of `arborsim.products.plan.quick.quick_tables`.

    Parameters
    ----------
    model
        Geometry to charge for: a name, or a config.json.
    rate
        Searches that arrive: 20/min, 0.5/s, 1200/h.
    p95
        Time from arrival to answer that 95% must meet: 60s, 2min.
    p50
        The same for 50%.
    p99
        The same for 99%.
    tree
        depth=6,width=16,thought=80: levels, thoughts on each, tokens of each; branch=4 are the
        children of a thought. 40..160 is a uniform range.

        In Python also a mapping: ``{"depth": 6, "width": 16, "thought": 80}``.
    chain
        tokens=8000: one chain of thought.
    trace
        Recorded searches instead.
    prompt
        Tokens of the prompt.
    solved
        Share of correct answers.
    policies
        Policies by comma.
    budgets
        Shares (0.5) or tokens (2048), by comma.
    kv_dtype
        Type of the KV cache.
    weights
        Type of the weights.
    quick
        Two runs of 200 searches, loads 6% apart, in place of three of 1,000, 2% apart: under a
        minute on two cores. Where compared, largest loads were 12% lower to 9% higher.
    """

    model: Annotated[str | None, Option(complete="model")] = None
    rate: Annotated[str | float | None, Option(shown="seek the largest")] = None
    p95: str | float | None = None
    p50: str | float | None = None
    p99: str | float | None = None
    tree: str | Mapping[str, Any] | None = None
    chain: str | int | Mapping[str, Any] | None = None
    trace: Annotated[AnyPath | None, Option(complete="trace")] = None
    prompt: Annotated[str | int | None, Option("prompt-tokens", shown="500")] = None
    solved: Annotated[float | None, Option(shown="unknown")] = None
    policies: Annotated[
        str | Sequence[str] | None,
        Option("policy", complete="policy", shown="full, kivi, streaming-llm"),
    ] = None
    budgets: Annotated[
        str | float | Sequence[str | float] | None, Option("budget", shown="0.5")
    ] = None
    kv_dtype: Annotated[str | None, Option(shown="the model's")] = None
    weights: Annotated[str | None, Option(shown="the model's")] = None
    quick: bool = False

    @property
    def asked(self) -> dict[str, Any]:
        """The options that were given, by keyword."""
        given = {each.name: getattr(self, each.name) for each in fields(QuickOptions)}
        for name in ("policies", "budgets"):
            texts = listed(given[name] or ())
            if all(isinstance(each, str) for each in texts):
                given[name] = choices.names(texts)
        return {name: value for name, value in given.items() if value not in (None, [], False)}
