"""Demands in seconds: every phase priced by the cost model, once, before anything is served."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.machine.cost import CostModel, Reads
from arborsim.machine.demand import ATTENDED_UNITS, LEG_COLUMNS, Op, SearchDemand
from arborsim.machine.options import ServingOptions
from arborsim.machine.pieces import LINEAR
from arborsim.machine.priced import Extra, Leg, Piece, PricedDemand
from arborsim.machine.profile import Direction

__all__ = ["Extra", "Leg", "Piece", "PricedDemand", "Pricing"]

_TABLE = ("flops", "kv", "quantised", "policy")


class Pricing:
    """Seconds of demands on one machine.

    Parameters
    ----------
    cost : CostModel
    options : ServingOptions
    """

    def __init__(self, cost: CostModel, options: ServingOptions) -> None:
        self.cost = cost
        self.gpus = options.tensor_parallel
        self._nvme_bytes_per_s = options.nvme_bytes_per_s
        profile, geometry = cost.profile, cost.geometry
        idle = cost.decode(Reads(0, 0.0, 0.0))
        self._weights_s: dict[int, float] = {}
        self._transfers_s: dict[tuple[int, bool], float] = {}
        self.layers_s = float(idle.layers_s)
        self.eager_layers_s = float(cost.decode(Reads(0, 0.0, 0.0), fused=False).layers_s)
        self.step_s, self.sequence_s = float(profile.per_step_s), float(profile.per_sequence_s)
        self.overlap = float(profile.overlap)
        if self.gpus > 1:
            ring = 2 * (self.gpus - 1) / self.gpus
            row_bytes = geometry.hidden * geometry.weight_bytes_per_element
            self.step_s += 2 * geometry.layers * options.all_reduce_latency_s
            per_token_s = ring * row_bytes / options.all_reduce_bytes_per_s
            self.sequence_s += 2 * geometry.layers * per_token_s

    def weights_s(self, tokens: int) -> float:
        """Reading the weights that a pass over so many tokens uses."""
        found = self._weights_s.get(tokens)
        if found is None:
            found = float(self.cost.decode(Reads(tokens, 0.0, 0.0)).weights_s) / self.gpus
            self._weights_s[tokens] = found
        return found

    def price(self, demand: SearchDemand) -> PricedDemand:
        """Price every phase.

        Raises
        ------
        UsageError
            The demand counts the bytes of another model.
        """
        geometry, info = self.cost.geometry, demand.info
        if (info.geometry, info.kv_bytes_per_token) != (geometry.name, geometry.kv_bytes_per_token):
            raise UsageError(
                f"the demand of {info.trace} episode {info.episode} was recorded for "
                f"{info.geometry}, not {geometry.name}: record it again"
            )
        if not self._op_s(demand, (Op.TURN, 1, 0, 0)):
            demand = demand.without_turns
        pieces = self._pieces(demand)
        ops = [tuple(op) for op in demand.ops.tolist()]
        for at, op in enumerate(ops):
            # The end of the first iteration is when the first token is there.
            if op[0] == Op.DECODE and pieces[op[1]].iterations > 1:
                one, rest = pieces[op[1]].split(1)
                pieces[op[1]] = one
                ops.insert(at + 1, (int(Op.DECODE), len(pieces), 0, 0))
                pieces.append(rest)
            if op[0] == Op.DECODE:
                break
        return PricedDemand(
            demand, ops, [self._op_s(demand, op) for op in ops], pieces, self._chains(demand),
            info.prefix_tokens if info.prefix else 0,
            next((op[2] for op in ops if op[0] == Op.LEVEL), 0) if info.prefix else 0,
        )  # fmt: skip

    def prefill_s(self, tokens: int, present: int, fused: bool = True) -> float:
        """A pass over `tokens` with `present` ones before them."""
        if not tokens:
            return 0.0
        terms = self.cost.prefill(tokens, present)
        compute_s = (terms.matrices_s + terms.attention_s) / self.gpus
        memory_s = terms.memory_s / self.gpus
        bound_s = max(compute_s, memory_s) + (1 - self.overlap) * min(compute_s, memory_s)
        overhead_s = self.layers_s + self.step_s + self.sequence_s
        rest_s = self._reduced_s(tokens) + self.eager_s(tokens, present, fused)
        return bound_s + overhead_s + rest_s

    def chunk(self, tokens: int, present: int, fused: bool) -> Extra:
        """The next `tokens` of a prompt, with `present` ones before them, within an iteration."""
        terms = self.cost.prefill(tokens, present)
        return Extra(
            flops_s=(terms.matrices_s + terms.attention_s) / self.gpus,
            kv_s=terms.memory_s / self.gpus - self.weights_s(tokens),
            other_s=self.eager_s(tokens, present, fused) + self._reduced_s(tokens),
            sequences=1,
            tokens=tokens,
        )

    def _reduced_s(self, tokens: int) -> float:
        """Adding up the activations of all tokens of a pass but one, which counts as a sequence."""
        return (tokens - 1) * (self.sequence_s - self.cost.profile.per_sequence_s)

    def eager_s(self, tokens: int, present: int, fused: bool) -> float:
        """Writing out and reading back the probabilities of a prefill pass."""
        if fused:
            return 0.0
        # The model's formula is for a square: scale it to these rows and columns.
        share = (tokens + present) / tokens
        return self.cost.eager_prefill_s(tokens) * share / self.gpus

    def transfer_s(self, size_bytes: int, up: bool) -> float:
        """A packed transfer, each GPU carrying its part over its own link."""
        found = self._transfers_s.get((size_bytes, up))
        if found is None:
            part = size_bytes / self.gpus
            direction: Direction = "h2d" if up else "d2h"
            block_bytes = self.cost.packed_block_bytes(part)
            found = float(self.cost.transfer_s(part, block_bytes, direction))
            self._transfers_s[size_bytes, up] = found
        return found

    def nvme_s(self, size_bytes: int) -> float:
        """Reading or writing so much below DDR."""
        return size_bytes / self._nvme_bytes_per_s

    def workspace_bytes(self, demands: Sequence[SearchDemand], chunk: int) -> int:
        """What the largest forward pass of these searches needs on each GPU."""
        largest = 0
        for demand in demands:
            passes = demand.ops[np.isin(demand.ops[:, 0], (Op.PREFILL, Op.RECOMPUTE)), 1]
            tokens = int(passes.max(initial=0))
            tokens = min(tokens, chunk) if chunk else tokens
            needed = self.cost.workspace_bytes(tokens)
            if not demand.info.fused:
                needed += self.cost.eager_prefill_bytes(tokens)
            largest = max(largest, needed)
        return -(-largest // self.gpus)

    def _op_s(self, demand: SearchDemand, op: tuple[int, ...]) -> float:
        info, (kind, one, two, _) = demand.info, op
        if kind == Op.PREFILL:
            return self.prefill_s(one, 0, info.fused)
        if kind == Op.RECOMPUTE:
            return self.prefill_s(one, two)
        if kind in (Op.DECIDE, Op.TURN):
            policy = self.cost.profile.policy_seconds(info.policy, info.fused)
            return float(policy.decision_s(one) if kind == Op.DECIDE else policy.turning_s(one))
        if kind == Op.COPY:
            return float(self.cost.copy_s(one)) / self.gpus
        return 0.0

    def _chains(self, demand: SearchDemand) -> list[list[Leg]]:
        count = int((demand.ops[:, 0] == Op.SEND).sum())
        chains: list[list[Leg]] = [[] for _ in range(count)]
        for row in demand.legs.tolist():
            chain, up, size, before, after = (row[LEG_COLUMNS.index(n)] for n in LEG_COLUMNS)
            chains[chain].append(Leg(bool(up), size, before, after))
        return chains

    def _pieces(self, demand: SearchDemand) -> list[Piece]:
        count = demand.column("iterations")
        last = np.maximum(count - 1, 1)
        first = self._seconds(demand, np.zeros_like(count))
        final = self._seconds(demand, last)
        growth = {name: (final[name] - first[name]) / last for name in _TABLE}
        values = {name: (demand.column(name), demand.column(f"{name}_growth")) for name in LINEAR}
        link_s = self._stream_s(demand.column("streamed_bytes"))
        stream_s = np.zeros_like(link_s) if demand.info.recall == "ondemand" else link_s
        near_s = self._near_s(demand)
        eager = int(not demand.info.fused)
        pairs: list[list[tuple[Any, ...]]] = [
            list(map(tuple, np.stack(pair, axis=1).tolist()))
            for pair in (
                *((first[name], growth[name]) for name in _TABLE),
                values["hbm_bytes"],
                values["prefix_bytes"],
            )
        ]
        streamed = demand.column("streamed_bytes")
        rows: Iterator[tuple[Any, ...]] = zip(
            count.tolist(), demand.column("sequences").tolist(), *pairs, stream_s.tolist(),
            near_s.tolist(), link_s.tolist(), streamed.tolist(), strict=True,
        )  # fmt: skip
        return [Piece(*(*row, eager)) for row in rows]

    def _seconds(self, demand: SearchDemand, i: np.ndarray) -> dict[str, np.ndarray]:
        """Seconds of iteration `i` of every piece, by what bounds them."""

        def at(name: str) -> np.ndarray:
            return np.asarray(demand.column(name) + i * demand.column(f"{name}_growth"), float)

        info, width = demand.info, demand.column("sequences")
        sequences: Any = width  # an array, where the model's formulas take one number
        scale = ATTENDED_UNITS * info.groups * self.cost.geometry.layers
        reads = Reads(sequences, at("attended") / scale, at("read_bytes"), at("quantised_bytes"))
        terms = self.cost.decode(reads, info.fused)
        policy = self.cost.profile.policy_seconds(info.policy, info.fused)
        policy_s = np.array([policy.observing_s(w) for w in width.tolist()], dtype=float)
        policy_s += np.where(demand.column("decided") > 0, policy.decision_s(at("examined")), 0.0)
        policy_s += np.asarray(self.cost.eager_rows_s(at("rows") / scale)) / self.gpus
        return {
            "flops": np.asarray(terms.flops_s) / self.gpus,
            "kv": np.asarray(terms.kv_s) / self.gpus,
            "quantised": np.asarray(terms.dequantise_s) / self.gpus,
            "policy": policy_s,
        }

    def _stream_s(self, size_bytes: np.ndarray) -> np.ndarray:
        return np.asarray(self.cost.stream(0.0, size_bytes / self.gpus).total_s, dtype=float)

    def _near_s(self, demand: SearchDemand) -> np.ndarray:
        """What the CPU, and pages fetched on demand, take per iteration.

        The GPU attends to the fetched pages afterwards: that part of its attention hides nothing.
        """
        cost, on_demand = self.cost, demand.info.recall == "ondemand"
        columns = (demand.column(name) for name in ("remote_bytes", "streamed_bytes", "sequences"))
        seconds = []
        for remote, fetched, width in zip(*(c.tolist() for c in columns), strict=True):
            if on_demand:
                side = cost.ondemand(0.0, np.float64(fetched), np.float64(remote), width)
                seconds.append(float(side.total_s) + float(cost.kv_read_s(fetched)) / self.gpus)
            else:
                seconds.append(float(cost.near(0.0, np.float64(remote), width).total_s))
        return np.array(seconds, dtype=float)
