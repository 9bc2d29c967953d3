"""arborsim: what a KV-cache policy costs, and what it breaks, when a language model searches.

A trace-driven discrete-event simulator that replays recorded searches (attention, hidden
states, tree events) against KV-cache policies.  The policies are plain NumPy objects that know no
simulator; the backend in ``arborsim_torch`` records live models and runs the same policies on them.

    import arborsim

    results = arborsim.replay("traces/chain-tree.parquet", policies=["h2o", "arborkv"],
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
  (`arborsim.search.base.Search`), and the entry-point groups ``arborsim.policies``,
  ``arborsim.searches`` and ``arborsim.backends``;
- trace format version 1: files stay readable;
- commands, options and exit codes, and the schemas of ``--json``, which may grow.

All other modules, `raw` of results, the wording of tables, pages and messages, and simulated
seconds (models of hardware get better) may change in any version.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arborsim.api.live import LiveResults, live
    from arborsim.api.plan import PlanResults, plan
    from arborsim.api.record import record
    from arborsim.api.replay import ReplayResults, replay
    from arborsim.api.results import Results, load_results
    from arborsim.api.search import SearchResults, search
    from arborsim.api.sweep import SweepResults, results, sweep
    from arborsim.api.trace import Trace, open_trace
    from arborsim.api.tune import TuneResults, tune
    from arborsim.api.validation import ValidationResults
    from arborsim.core.errors import ArborsimError

__version__ = "0.1.0"
__all__ = [
    "ArborsimError",
    "LiveResults",
    "PlanResults",
    "ReplayResults",
    "Results",
    "SearchResults",
    "SweepResults",
    "Trace",
    "TuneResults",
    "ValidationResults",
    "live",
    "load_results",
    "open_trace",
    "plan",
    "record",
    "replay",
    "results",
    "search",
    "sweep",
    "tune",
]

#: The module of each name.
_HOME = {
    "ArborsimError": "core.errors",
    "LiveResults": "api.live",
    "PlanResults": "api.plan",
    "ReplayResults": "api.replay",
    "Results": "api.results",
    "SearchResults": "api.search",
    "SweepResults": "api.sweep",
    "Trace": "api.trace",
    "TuneResults": "api.tune",
    "ValidationResults": "api.validation",
    "live": "api.live",
    "load_results": "api.results",
    "open_trace": "api.trace",
    "plan": "api.plan",
    "record": "api.record",
    "replay": "api.replay",
    "results": "api.sweep",
    "search": "api.search",
    "sweep": "api.sweep",
    "tune": "api.tune",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'arborsim' has no attribute '{name}'")
    return import_module(f"arborsim.{name}") if name in _PACKAGES else _exported(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _exported(name: str) -> Any:
    return getattr(import_module(f"arborsim.{_HOME[name]}"), name)


#: Functions that share their names with packages of ours.
_PACKAGES = {"search", "plan", "live", "sweep"}


class _CallablePackage(ModuleType):
    """A package whose name is also that of a function: called, it is the function."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._function(*arguments, **keywords)

    @property
    def _function(self) -> Any:
        return _exported(self.__name__.rpartition(".")[2])

    @property
    def __signature__(self) -> Any:
        from inspect import signature

        return signature(self._function)

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return str(self._function.__doc__)


class _Arborsim(ModuleType):
    """This package: `arborsim.plan` can be called, whatever was imported before."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _PACKAGES and isinstance(value, ModuleType):
            value.__class__ = _CallablePackage
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Arborsim
