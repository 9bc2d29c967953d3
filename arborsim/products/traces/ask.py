"""`arborsim.open_trace`: what a recording holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborsim.core.errors import UnknownName

if TYPE_CHECKING:
    import os

    import pandas as pd
    from rich.console import Console

    from arborsim.products.traces.describe import Description
    from arborsim.trace.episode import Episode
    from arborsim.trace.schema import TraceInfo


def open_trace(path: str | os.PathLike[str]) -> Trace:
    """Open a trace, or the ``.parts`` directory of an interrupted recording.

    Reads the file's metadata only. Episodes are read one at a time, when they are asked for.

    Raises
    ------
    TraceError
        The file is missing, damaged or no trace.

    Examples
    --------
    >>> import arborsim
    >>> trace = arborsim.open_trace("traces/game24-tot.parquet")
    >>> trace.info.search
    'tot-bfs'
    >>> len(trace)
    80
    """
    return Trace(path)


class Trace:
    """A recording of searches: `len` counts its episodes, iterating reads them one by one.

    Attributes
    ----------
    path : Path
    info : TraceInfo
        How it was made: model and its geometry, task, search, seed, capture level, versions.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        from arborsim.trace.reader import TraceReader

        self._reader = TraceReader(Path(path))
        self.path = self._reader.path
        self.info: TraceInfo = self._reader.info

    @cached_property
    def signals(self) -> tuple[str, ...]:
        """Observations of the tokens, which policies can read: ``"attention"`` and others."""
        from arborsim.core.observations import Signal

        return tuple(str(signal) for signal in Signal if self._reader.has(signal))

    def episodes(
        self,
        signals: Iterable[str] = (),
        *,
        start: int = 0,
        stop: int | None = None,
        text: bool = False,
    ) -> Iterator[Episode]:
        """Episodes in order, each with the named `signals`, and with texts if `text`.

        Raises
        ------
        UnknownName
            There is no such signal.
        MissingSignal
            The trace does not hold it.
        """
        from arborsim.core.observations import Signal

        known = {str(signal): signal for signal in Signal}
        for name in signals:
            if name not in known:
                raise UnknownName("signal", name, known)
        wanted = [known[name] for name in signals]
        self._reader.require(wanted, "open_trace")
        return self._reader.episodes(tuple(wanted), text=text, start=start, stop=stop)

    def __iter__(self) -> Iterator[Episode]:
        return self.episodes()

    def __fspath__(self) -> str:
        return str(self.path)  # so that it can be given wherever a path can

    def __len__(self) -> int:
        return self._reader.num_episodes

    @cached_property
    def description(self) -> Description:
        """All that ``arborsim inspect --json`` says: sizes, spreads, which policies it serves.

        Reads the whole trace.
        """
        from arborsim.products.traces.describe import describe

        return describe(self._reader)

    def to_pandas(self) -> pd.DataFrame:
        """One row per episode: tokens, nodes, depth, branching, iterations, and the verdict.

        `duration_s` is missing where the trace knows no times, `correct` where it was not judged.
        """
        import pandas as pd

        frame = pd.DataFrame([vars(each) for each in self.description.episodes])
        return frame.astype({"correct": "boolean"})

    def __repr__(self) -> str:
        info = self.info
        return f"<Trace {self.path}: {len(self)} episodes of {info.task}, {info.search}>"

    def inspect(
        self,
        console: Console | None = None,
        *,
        everything: bool = False,
        episodes: int | None = None,
        nodes: int | None = None,
    ) -> None:
        """Print what the trace holds: a screen of it, or `everything`.

        The trees of the first `episodes` are drawn, with at most `nodes` nodes each.
        """
        from arborsim.products.traces.tables import print_trace

        print_trace(
            self._reader, self.description, console, everything=everything, episodes=episodes,
            nodes=nodes,
        )  # fmt: skip

    def _facts(self) -> dict[str, Any]:
        info, found = self.info, self.description
        right = found.accuracy
        return {
            "file": f"{self.path}, {found.file_bytes / 1e6:,.1f} MB",
            "model": info.model,
            "task, search": f"{info.task}, {info.search}",
            "episodes": f"{len(self):,}",
            "tokens": f"{found.spreads['generated_tokens'].total:,.0f} generated",
            "accuracy": f"{right.correct}/{right.judged}" if right else "not judged",
            "capture": f"{info.capture}, attention {info.attention}",
            "signals": ", ".join(found.signals),
            "policies": f"{sum(not fit.missing for fit in found.policies)} of "
            f"{len(found.policies)} can be replayed",
        }

    def __str__(self) -> str:
        facts = self._facts()
        width = max(map(len, facts))
        return "\n".join(f"{name:{width}}  {fact}" for name, fact in facts.items())

    def _repr_html_(self) -> str:
        from html import escape

        cell = "text-align:left;padding:0.15em 0.6em;border:0"
        rows = "".join(
            f'<tr><th style="{cell}">{escape(name)}</th><td style="{cell}">{escape(fact)}</td></tr>'
            for name, fact in self._facts().items()
        )
        return f'<table style="border-collapse:collapse">{rows}</table>'
