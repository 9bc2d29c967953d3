"""arborsim: what a KV-cache policy costs, and what it breaks, when a language model searches.

A trace-driven discrete-event simulator that replays recorded searches (attention, hidden
states, tree events) against KV-cache policies.  The policies are plain NumPy objects that know no
simulator; the backend in ``arborsim_torch`` records live models and runs the same policies on them.

    import arborsim

    results = arborsim.replay("traces/chain-tree.parquet", policies=["epikv", "arborkv"],
                              budgets=[0.5, 0.7], model="llama-3.1-8b")
    results.summary()               # a data frame
    results.report("report.html")   # one page to send

Every command of the command line is one of these functions.  Whatever a caller can do wrong is an
`ArborsimError` of one line.  Importing this package imports neither NumPy nor torch: what is needed
is imported on first use.

Stability
---------
Public, and changed only with a note in the changelog and, from version 1.0 on, a new major
version:

- the names in ``arborsim.__all__``, the keywords of the functions, and the documented methods and
  attributes of what they return;
- the columns and units of `Results.to_pandas` and `Results.summary`, which may grow, and the keys
  of `Results.metadata`;
- the contracts of policies (`arborsim.policies.base.Policy`) and of searches
  (`arborsim.searches.base.Search`), and the entry-point groups ``arborsim.policies``,
  ``arborsim.searches`` and ``arborsim.backends``;
- trace format version 1: files stay readable;
- commands, options and exit codes, and the schemas of ``--json``, which may grow.

All other modules, `raw` of results, the wording of tables, pages and messages, and simulated
seconds (models of hardware get better) may change in any version.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from arborsim.core import __version__ as __version__

if TYPE_CHECKING:
    from arborsim.core.errors import ArborsimError
    from arborsim.policies.function import score
    from arborsim.products.fidelity.ask import fidelity
    from arborsim.products.fidelity.results import FidelityResults
    from arborsim.products.kinds import load_results
    from arborsim.products.live.ask import live
    from arborsim.products.live.results import LiveResults
    from arborsim.products.plan.ask import PlanResults, plan
    from arborsim.products.record.ask import record
    from arborsim.products.record.recorder import Recorder
    from arborsim.products.replay.ask import ReplayResults, replay
    from arborsim.products.results import Results
    from arborsim.products.search.ask import SearchResults, search
    from arborsim.products.sweep.ask import SweepResults, results, sweep
    from arborsim.products.traces.ask import Trace, open_trace
    from arborsim.products.tune.ask import TuneResults, tune
    from arborsim.products.validate.ask import ValidationResults

__all__ = [
    "ArborsimError",
    "FidelityResults",
    "LiveResults",
    "PlanResults",
    "Recorder",
    "ReplayResults",
    "Results",
    "SearchResults",
    "SweepResults",
    "Trace",
    "TuneResults",
    "ValidationResults",
    "fidelity",
    "live",
    "load_results",
    "open_trace",
    "plan",
    "record",
    "replay",
    "results",
    "score",
    "search",
    "sweep",
    "tune",
]

#: The module of each name.
_HOME = {
    "ArborsimError": "core.errors",
    "FidelityResults": "products.fidelity.results",
    "LiveResults": "products.live.results",
    "PlanResults": "products.plan.ask",
    "Recorder": "products.record.recorder",
    "ReplayResults": "products.replay.ask",
    "Results": "products.results",
    "SearchResults": "products.search.ask",
    "SweepResults": "products.sweep.ask",
    "Trace": "products.traces.ask",
    "TuneResults": "products.tune.ask",
    "ValidationResults": "products.validate.ask",
    "fidelity": "products.fidelity.ask",
    "live": "products.live.ask",
    "load_results": "products.kinds",
    "open_trace": "products.traces.ask",
    "plan": "products.plan.ask",
    "record": "products.record.ask",
    "replay": "products.replay.ask",
    "results": "products.sweep.ask",
    "score": "policies.function",
    "search": "products.search.ask",
    "sweep": "products.sweep.ask",
    "tune": "products.tune.ask",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'arborsim' has no attribute '{name}'")
    return getattr(import_module(f"arborsim.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
