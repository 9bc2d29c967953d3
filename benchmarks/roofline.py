"""What a smaller cache can save on a GPU, launched kernel by kernel or as CUDA graphs.

    python benchmarks/roofline.py --gpu h200 --model llama-3.1-8b

Predicted seconds of one decode iteration of the live backend, under the engines ``live`` and
``live-graphs``: the longer of launching and of the GPU's work.  What a policy takes on the host for
its decisions is left out, so these are bounds of what it can save.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

from arborsim.core.formats import FP8
from arborsim.core.geometry import Geometry
from arborsim.machine.batch import Batch, IterationTime
from arborsim.machine.cost import CostModel
from arborsim.machine.lookup import load_geometry, load_profile
from arborsim.machine.machine import parts_read
from arborsim.machine.price import Price
from arborsim.machine.program import ATTENDED_UNITS, PIECE_COLUMNS, DemandInfo
from arborsim.policies.registry import build

CONTEXTS = (8192, 32768, 65536)
ENGINES = {"live": "kernel by kernel", "live-graphs": "CUDA graphs"}


@dataclass(frozen=True)
class Arm:
    """What attention reads under a policy, as shares of the context's tokens."""

    policy: str
    kept: float
    quantised: float = 0.0  # of those kept
    streamed: float = 0.0  # read from DDR in every iteration

    @property
    def name(self) -> str:
        notes = [f"{self.kept:.0%}"] if self.kept < 1 else []
        notes += [f"{self.quantised:.0%} of it in 8 bits"] if self.quantised else []
        notes += [f"{self.streamed:.0%} streamed from DDR"] if self.streamed else []
        return ", ".join([f"`{self.policy}`", *notes])


ARMS = (
    Arm("full", 1.0), Arm("streaming-llm", 0.25), Arm("epikv", 0.25), Arm("h2o per=shared", 0.25),
    Arm("arkv", 0.25, quantised=0.25), Arm("hierarchy", 1.0, streamed=0.5),
)  # fmt: skip


def iteration_s(price: Price, arm: Arm, context: int) -> float:
    """Of one search of one sequence."""
    name, *settings = arm.policy.split()
    geometry = price.cost.geometry
    policy = build(name, dict(each.split("=") for each in settings))
    tokens = int(arm.kept * context)
    token, small = geometry.full_bytes_per_token, FP8.token_bytes(geometry)
    quantised = int(arm.quantised * tokens)
    streamed = int(arm.streamed * context) * token
    of_layer = {"shared": 0, "layer": 1, "head": geometry.kv_heads}[policy.grouping]
    groups = max(1, of_layer * geometry.layers)
    scale = ATTENDED_UNITS * geometry.layers * groups
    asked = {
        "iterations": 1, "sequences": 1, "read_bytes": (tokens - quantised) * token
        + quantised * small, "quantised_bytes": quantised * small, "streamed_bytes": streamed,
        "attended": tokens * scale, "rows": 0 if policy.fused else tokens * scale,
    }  # fmt: skip
    row = np.array([[asked.get(name, 0) for name in PIECE_COLUMNS]], dtype=np.int64)
    info = DemandInfo(
        "", 0, "", "", "stream" if streamed else "stage", geometry.name, 0, groups, policy.fused,
        parts=parts_read(policy),
    )  # fmt: skip
    batch = Batch()
    batch.add(0, *price.pieces(info, row))
    return IterationTime(price).terms(batch.sums, 0)[0]


def table(gpu: str, geometry: Geometry) -> list[str]:
    """Markdown: milliseconds per token, and what is saved of full retention's."""
    columns = [(engine, context) for engine in ENGINES for context in CONTEXTS]
    heads = [f"{ENGINES[engine]}, {context // 1024}k" for engine, context in columns]
    lines = [f"| {' | '.join(['policy', *heads])} |", "|---" + "|---:" * len(heads) + "|"]
    prices = {
        engine: Price(CostModel(load_profile(gpu, engine=engine), geometry)) for engine in ENGINES
    }
    full = {each: iteration_s(prices[each[0]], ARMS[0], each[1]) for each in columns}
    for arm in ARMS:
        cells = []
        for engine, context in columns:
            seconds = iteration_s(prices[engine], arm, context)
            saved = 1 - seconds / full[engine, context]
            cells.append(f"{1e3 * seconds:.1f}" + (f" ({saved:+.0%})" if arm != ARMS[0] else ""))
        lines.append(f"| {' | '.join([arm.name, *cells])} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--model", default="llama-3.1-8b")
    options = parser.parse_args()
    print("\n".join(table(options.gpu, load_geometry(options.model))))


if __name__ == "__main__":
    main()
