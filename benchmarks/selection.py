"""What choosing pages with the query before costs: attention kept and output error.

``python benchmarks/selection.py [TRACE]``, by default of ``traces/chain-vectors.parquet``, whose
searches are chains.

Quest chooses pages with the query that is about to read them.  A policy decides between steps, so
that its newest query is one token old.  A replay can look ahead: here Quest plays with either.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.tiers import Budget
from arborsim.machine.executor import SimulatedExecutor
from arborsim.machine.lookup import load_profile
from arborsim.machine.machine import Machine
from arborsim.play.episode import Cell, play_episode
from arborsim.play.meters import Quality
from arborsim.policies.methods.pages import Quest
from arborsim.signals.pages import Queries
from arborsim.signals.rows import head_rows
from arborsim.signals.scores import Score
from arborsim.trace.reader import TraceReader

TRACE = Path(__file__).parents[1] / "traces" / "chain-vectors.parquet"
BUDGETS = ("0.25", "0.5", "0.75")
PAGES = (4, 16)


@dataclass(frozen=True)
class NextQueries(Queries):
    """Every token's successor's query; the last one of a search has its own."""

    def compute(self, run: TokenRun) -> np.ndarray:
        rows, found = head_rows(run.observed), []
        for token in range(run.num_tokens):
            try:
                found.append(rows.query(token + 1))
            except IndexError:
                found.append(rows.query(token))
        queries = np.stack(found)
        return queries.reshape(len(queries), -1, queries.shape[-1]).swapaxes(0, 1)


@dataclass(frozen=True)
class Ahead(Quest):
    """Quest with the query that reads the pages."""

    def scores(self) -> Mapping[str, Score]:
        return {**super().scores(), "queries": NextQueries()}


def main(trace: Path) -> None:
    reader = TraceReader(trace)
    quality = Quality.of(reader)
    machine = Machine(load_profile("h100"))
    needs = tuple(sorted(quality.reads(["head"]) | Quest().reads()))
    episodes = list(reader.episodes(needs))
    print("budget  page  attention kept, %         output error, %      generated tokens")
    print("              before  current  lost     before  current")
    for budget in BUDGETS:
        for page in PAGES:
            found = []
            for policy in (Quest(page=page, dense=0), Ahead(page=page, dense=0)):
                cell = Cell(policy, Budget.parse(budget))
                played = [
                    play_episode(
                        episode,
                        cell,
                        SimulatedExecutor.of(machine, policy, reader.info),
                        quality=quality,
                    )
                    for episode in episodes
                ]
                weights = [one.measured.generated_tokens for one in played]
                total = sum(weights)
                kept = math.fsum(w * p.attention_kept for w, p in zip(weights, played, strict=True))
                error = math.fsum(w * p.output_error for w, p in zip(weights, played, strict=True))
                found.append((100 * kept / total, 100 * error / total))
            (kept, error), (ahead, error_ahead) = found
            print(
                f"{budget:>6}  {page:>4}  {kept:6.2f}  {ahead:7.2f}  {ahead - kept:4.2f}  "
                f"{error:8.2f}  {error_ahead:7.2f}  {total:>12}"
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else TRACE)
