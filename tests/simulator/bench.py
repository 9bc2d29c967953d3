"""A machine small enough for hand calculation, and a driver that plays the controller's part."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.observations import Observations
from arborsim.core.tiers import Tier
from arborsim.core.tree import ThoughtTree
from arborsim.machine.executor import SimulatedExecutor
from arborsim.machine.machine import Machine
from arborsim.machine.profile import HardwareProfile
from arborsim.memory.moves import ALL_GROUPS, Moves
from arborsim.trace.schema import Geometry

#: 128 bytes of KV per token, 80 when quantised (64 elements + 4 scales); 2,000 bytes of weights.
GEOMETRY = Geometry(
    name="toy", layers=2, heads=2, kv_heads=1, head_dim=16, hidden=8, intermediate=16, vocab=10,
    parameters=1000,
)  # fmt: skip
KV = 128

#: 1 byte per microsecond everywhere, and nothing else costs time: 1 token of KV is 128 us.
PROFILE = HardwareProfile(
    name="toy", hbm_bytes=1_000_000, hbm_bytes_per_s=1e6, flops_per_s=1e15, ddr_bytes=1_000_000,
    ddr_bytes_per_s=1e6, mfu=1.0, mbu=1.0, kv_read_efficiency=1.0, eager_bytes_per_s=1e6,
    dequantise_bytes_per_s=1e6, per_layer_s=0.0, per_step_s=0.0, per_sequence_s=0.0,
    decision_base_s=0.0, decision_per_token_s=0.0, h2d_bytes_per_s=1e6, d2h_bytes_per_s=1e6,
    block_bytes=(1.0,), block_efficiency=(1.0,), pcie_latency_s=0.0, pageable_factor=0.5,
    reserve_share=0.1, all_reduce_gpus=(2,), all_reduce_bytes_per_s=(1e15,),
    all_reduce_latency_s=(0.0,),
)  # fmt: skip


def profile(**changes: Any) -> HardwareProfile:
    return replace(PROFILE, **changes)


def moves(tokens: Any, target: Tier | Any, step: Any = 0, group: Any = ALL_GROUPS) -> Moves:
    """Moves of `tokens`; the other columns may be single values."""
    token = np.atleast_1d(np.asarray(tokens, dtype=np.int64))
    full = [np.broadcast_to(np.asarray(column), token.shape) for column in (step, group, target)]
    return Moves(full[0].astype(np.int64), full[1].astype(np.int32), token, full[2].astype(np.int8))


def executor(
    machine: HardwareProfile = PROFILE,
    geometry: Geometry = GEOMETRY,
    kind: type[SimulatedExecutor] = SimulatedExecutor,
    **options: Any,
) -> SimulatedExecutor:
    """A simulated executor; options of the machine and of the executor itself."""
    names = {field.name for field in fields(Machine)}
    described = {name: options.pop(name) for name in names & set(options)}
    return kind(Machine(machine, **described), geometry, **options)


class Bench:
    """One executor and the tree that it follows."""

    def __init__(
        self, machine: HardwareProfile = PROFILE, geometry: Geometry = GEOMETRY, **options: Any
    ) -> None:
        self.tree = ThoughtTree()
        self.executor = executor(machine, geometry, **options)
        self.executor.bind(self.tree)

    def prefill(self, tokens: int) -> None:
        self.tree.open(0, -1)
        self.tree.append((0,), tokens)
        self.executor.prefill(self._run((0,), tokens))

    def turn(self, *leaves: int, parent: int = 0) -> None:
        """Make `leaves` active; the next new ones are opened under `parent`."""
        for leaf in leaves:
            if leaf == len(self.tree):
                self.tree.open(leaf, parent)
        self.tree.activate(leaves)
        self.leaves = leaves
        self.executor.activate(leaves)

    def decode(self, steps: int, inside: Moves | None = None) -> None:
        self.tree.append(self.leaves, steps)
        inside = Moves.none() if inside is None else inside
        self.executor.advance(self._run(self.leaves, steps), inside)

    def move(self, tokens: Any, target: Tier) -> None:
        self.executor.apply(moves(tokens, target), examined_tokens=self.tree.num_tokens)

    def us(self, part: str) -> float:
        """A part of the time split in microseconds."""
        return float(getattr(self.executor.measurements().time, part)) * 1e6

    @staticmethod
    def _run(leaves: tuple[int, ...], steps: int) -> TokenRun:
        count = steps * len(leaves)
        return TokenRun(leaves, steps, np.zeros(count, dtype=np.int32), Observations(count))
