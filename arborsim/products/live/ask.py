"""`arborsim.live`: policies on a live model, with tokens really removed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from arborsim.products.declare import (
    AnyPath,
    Count,
    InPython,
    Option,
    Options,
    Positive,
    Silent,
    call,
)
from arborsim.products.options import PolicyOptions
from arborsim.products.record.problems import RewardedProblems

if TYPE_CHECKING:
    from arborsim.products.live.results import LiveResults

_EVERY_S = 0.1


@dataclass(frozen=True, kw_only=True)
class CacheOptions(Options, panel="Cache"):
    """How the cache of the live model works, or its simulation.

    Parameters
    ----------
    recall
        How DDR tokens are read: stage, stream, near or ondemand.
    overlap
        Let copies run behind computation.
    graphs
        On a GPU, replay decode steps as CUDA graphs.
    page_tokens
        Slots that pools grow by.
    batch
        Searches computed together: more tokens per second, times that overlap.
    attention_top
        Positions kept of attention rows that a policy reads one by one.

        All do with `shadow`.  Sums and newest rows are always whole.
    masked
        Mask tokens in place of removing them: the same answers, sooner, without memory and speed.
    shadow
        Policies decide, nothing is removed. Bytes and seconds are simulated.
    gpu
        --shadow: GPU profile, a name or a TOML file.
    """

    recall: str = "stage"
    overlap: bool = True
    graphs: bool = True
    page_tokens: Annotated[Count, Option(shown="16, with --shadow 1")] = 0
    batch: Positive = 1
    attention_top: Annotated[Count, Option(shown="all, 256 for paths above 4096 tokens")] = 0
    masked: bool = False
    shadow: bool = False
    gpu: Annotated[str, Option(complete="gpu", shown="h100")] = ""


@dataclass(frozen=True, kw_only=True)
class LiveFiles(Options, panel="Output"):
    """Files that a live run writes.

    Parameters
    ----------
    out
        Log of all results, JSON lines.

        Each is on the disk before the next search.
    trace
        --shadow: also record this trace.
    resume
        Go on with the log.
    overwrite
        Replace log and trace.
    progress
        Show progress on standard error.
    """

    out: Annotated[AnyPath | None, Option(writes=True, silent=True)] = None
    trace: Annotated[AnyPath | None, Option(writes=True, silent=True)] = None
    resume: Silent = False
    overwrite: Silent = False
    progress: InPython = False


@dataclass(frozen=True, kw_only=True)
class LiveOptions(PolicyOptions, CacheOptions, RewardedProblems, LiveFiles):
    """Search live under KV-cache policies that really remove tokens, and count what is right.

    Every policy searches the same problems. Shows accuracy with its interval, memory by tier, and
    where the time went, all against full retention. Needs the extra torch. Ctrl-C keeps the log.
    Exit code 130.

    Parameters
    ----------
    full
        Also run full retention, to compare.

    Returns
    -------
    LiveResults

    Examples
    --------
    >>> import arborsim
    >>> results = arborsim.live(task="chain", episodes=40, policies="h2o", budgets=[0.7, 0.85])
    ... # doctest: +SKIP
    """

    full: bool = True

    def results(self) -> LiveResults:
        """Search everything."""
        from arborsim.products.live.run import LiveRun

        running = LiveRun(self)
        running.run()
        return running.results()


live = call("live", LiveOptions)
