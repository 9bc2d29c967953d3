"""Prices programs: every phase in seconds, by the terms of `arborsim.machine.terms`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.core.tiers import DDR
from arborsim.machine.cost import Array, CostModel
from arborsim.machine.integration import NO_LONGER, Integration, Longer, PolicySeconds
from arborsim.machine.machine import ServingOptions
from arborsim.machine.operations import Built, operations_of
from arborsim.machine.passes import Passes
from arborsim.machine.profile import Direction
from arborsim.machine.program import (
    ATTENDED_UNITS,
    FIXED,
    LINEAR,
    PIECE_COLUMNS,
    Copied,
    DemandInfo,
    Extra,
    Op,
    Piece,
    PricedProgram,
    SearchDemand,
    iterations,
)
from arborsim.machine.terms import (
    ATTENTION,
    COPY_TERMS,
    ITERATION_TERMS,
    LAUNCHES,
    MATRICES,
    MOVES,
    PARTS,
    PREFILL_TERMS,
    REHYDRATION,
    SIDE_TERMS,
    Asked,
    IterationTerm,
    Term,
)


class Price(Passes):
    """Seconds of programs on one machine."""

    def __init__(self, cost: CostModel, options: ServingOptions | None = None) -> None:
        options = options or ServingOptions()
        super().__init__(cost, options)
        self._nvme_bytes_per_s = options.nvme_bytes_per_s
        self._weights_s: dict[int, float] = {}
        self._pass_s: dict[tuple[Any, ...], float] = {}
        self._transfers_s: dict[tuple[int, bool, int], float] = {}
        self._policies: dict[tuple[str, bool, bool], PolicySeconds] = {}
        self._built: dict[str, Built | None] = {}
        self._terms = [term for term in ITERATION_TERMS if term.measured in (None, self.measured)]
        self._terms_by_part: dict[tuple[str, bool], list[IterationTerm]] = {}
        for term in self._terms:
            self._terms_by_part.setdefault((term.part, term.shared), []).append(term)

    # What a batch takes once.

    def weights_s(self, tokens: int) -> float:
        """Reading the weights that a pass over n tokens uses, unless kernels were measured."""
        found = self._weights_s.get(tokens)
        if found is None:
            found = self._weights_s[tokens] = self._shared_s("kv", tokens)
        return found

    def pass_s(
        self, sequences: int, tokens: int = 0, prompts: int = 0, longer: Longer = NO_LONGER
    ) -> float:
        """Seconds of a pass that nothing hides, but for those that each sequence adds.

        `sequences` decode, under a policy whose layers take `longer` more; `tokens` of prompts
        are computed with them, `prompts` of which end.
        """
        key = sequences, tokens, prompts, longer
        found = self._pass_s.get(key)
        if found is None:
            found = self._pass_s[key] = self._shared_s("serial", *key)
        return found

    def _shared_s(
        self,
        part: str,
        sequences: int,
        tokens: int = 0,
        prompts: int = 0,
        longer: Longer = NO_LONGER,
    ) -> float:
        counts, none = np.full(1, sequences), np.zeros(1)
        asked = Asked(
            PolicySeconds(layer_s=longer.one_s, wide_layer_s=longer.several_s),
            True,
            counts,
            *(none,) * 10,
            counts + tokens,
            none,
            prompts,
        )
        return float(self._part_s(part, asked, shared=True)[0])

    def _part_s(self, part: str, asked: Asked, shared: bool = False) -> np.ndarray:
        """A part of each iteration's time: what one search adds to it, or the batch takes once."""
        found = np.zeros(len(asked.sequences))
        for term in self._terms_by_part.get((part, shared), ()):
            found = found + term.seconds(self, asked)
        return found

    # Phases of a program.

    def program(self, demand: SearchDemand) -> PricedProgram:
        """Price every phase; a `UsageError` if the demand counts the bytes of another model."""
        geometry, info = self.cost.geometry, self._as_built(demand.info)
        if (info.geometry, info.kv_bytes_per_token) != (geometry.name, geometry.kv_bytes_per_token):
            raise UsageError(
                f"the demand of {info.trace} episode {info.episode} was recorded for "
                f"{info.geometry}, not {geometry.name}: record it again"
            )
        if not self.op_s(info, (Op.TURN, 1, 0, 0)):
            demand = demand.without_turns
        pieces = self.pieces(info, demand.pieces)
        ops = [tuple(op) for op in demand.ops.tolist()]
        if not self.cost.move_s(1, 1, 1):
            ops = [op for op in ops if op[0] != Op.MOVE]
        for at, op in enumerate(ops):
            # The end of the first iteration is when the first token is there.
            if op[0] == Op.DECODE and pieces[op[1]].iterations > 1:
                one, rest = pieces[op[1]].split(1)
                pieces[op[1]] = one
                ops.insert(at + 1, (int(Op.DECODE), len(pieces), 0, 0))
                pieces.append(rest)
            if op[0] == Op.DECODE:
                break
        seconds = [self.op_s(info, op) for op in ops]
        shared = info.prefix_tokens, next((op[2] for op in ops if op[0] == Op.LEVEL), 0)
        shared = shared if info.prefix else (0, 0)
        return PricedProgram(demand, info, ops, seconds, pieces, demand.chains(), *shared)

    def op_s(self, info: DemandInfo, op: tuple[int, ...]) -> float:
        """Seconds of a phase; 0 of those that take none of the server's time."""
        return sum(term.seconds for term in self.op_terms(info, op))

    def op_terms(self, info: DemandInfo, op: tuple[int, ...]) -> list[Term]:
        """The time of a phase other than decoding, term by term."""
        kind, one, two = op[:3]
        if kind == Op.PREFILL:
            return self.prompt_terms(info, one)
        if kind == Op.RECOMPUTE:
            return [Term(REHYDRATION, self.prefill_s(one, two))]
        if kind in (Op.DECIDE, Op.TURN):
            policy = self.policy(info)
            if kind == Op.TURN:
                return [Term("policy: turns", float(policy.turning_s(one)))]
            launches_s = self.cost.geometry.layers * policy.deciding_layer_s
            return [Term("policy: decisions", float(policy.decision_s(one)) + launches_s)]
        if kind == Op.MOVE:
            return [Term(MOVES, self.cost.move_s(one, two, op[3]))]
        if kind == Op.COPY:
            return [Term(COPY_TERMS[Copied(two)], float(self.cost.copy_s(one)) / self.gpus)]
        return []

    def policy(self, info: DemandInfo) -> PolicySeconds:
        key = info.policy, info.fused, info.eager
        if key not in self._policies:
            self._policies[key] = self._policy_seconds(*key)
        return self._policies[key]

    def _policy_seconds(self, name: str, fused: bool, eager: bool) -> PolicySeconds:
        """As the method is built into the engine; without one, as the profile has it."""
        built = self.integration(name)
        if self.engine is None or built is None:
            return self.cost.profile.policy_seconds(name, fused, eager)
        layers, found = self.cost.geometry.layers, self.from_operations(name)
        seconds = built.seconds(layers) if found is None else found.seconds
        lost_s = self.engine.lost_s(built, layers)
        layer_s, wide_s = seconds.layer_s + lost_s, seconds.wide_layer_s + lost_s
        return replace(seconds, layer_s=layer_s, wide_layer_s=wide_s)

    def from_operations(self, policy: str) -> Built | None:
        """Seconds from a policy's operations; None where they were measured, or there are none."""
        if policy not in self._built:
            built = self.integration(policy)
            priced = built is not None and built.from_operations
            self._built[policy] = self.operations(operations_of(policy)) if priced else None
        return self._built[policy]

    def integration(self, policy: str) -> Integration | None:
        """How a policy is built into the engine; None of full retention, or if it is not known."""
        if self.engine is None or policy == "full":
            return None
        return self.engine.integration(policy)

    def _as_built(self, info: DemandInfo) -> DemandInfo:
        """A method that is built into the engine reads no attention rows apart from that.

        What was measured of it includes those of prompts, and its operations do not.
        """
        built = self.integration(info.policy)
        if built is None or info.fused:
            return info
        if built.from_operations:
            return replace(info, decode_rows=False)
        return replace(info, fused=True)

    def prefill_s(self, tokens: int, present: int, info: DemandInfo | None = None) -> float:
        """A pass over `tokens` with `present` ones before them; `info` if they end a prompt."""
        if not tokens:
            return 0.0
        return sum(term.seconds for term in self._prefill_terms(tokens, present, info))

    def prompt_terms(self, info: DemandInfo, tokens: int, part: int = 0) -> list[Term]:
        """The time of a prompt, term by term, computed in parts of `part` tokens (0: at once)."""
        found, part = list[Term](), part or tokens
        for present in range(0, tokens, part):
            now = min(part, tokens - present)
            found += self._prefill_terms(now, present, info, tokens - present - now)
        return found

    def _prefill_terms(
        self, tokens: int, present: int, info: DemandInfo | None, left: int = 0
    ) -> list[Term]:
        seconds, hidden = [0.0] * len(PREFILL_TERMS), [0.0] * len(PREFILL_TERMS)
        if self._forward is not None:
            forward = self._forward
            seconds[0] = self.products_s(tokens, 0, 1) + self.experts_s(tokens, 0)
            seconds[1] = self.prompt_attention_s(tokens, present)
            seconds[3] = self.layers_s(tokens) + self.step_s + self.sequence_s
            seconds[4] = forward.elementwise_s(tokens) + forward.all_reduce_s(tokens, True)
        else:
            cost = self.cost.prefill(tokens, present)
            compute_s, memory_s = cost.matrices_s + cost.attention_s, cost.memory_s
            computing, reading = map(
                float, _shown(compute_s / self.gpus, memory_s / self.gpus, self.overlap)
            )
            for i, share in enumerate((computing, computing, reading)):
                seconds[i], hidden[i] = (
                    share * cost[i] / self.gpus,
                    (1 - share) * cost[i] / self.gpus,
                )
            seconds[4] = self.all_reduce_s(tokens, True)
            seconds[3] = self.pass_s(0, tokens) + self.sequence_s - seconds[4]
        seconds[3] += max(0.0, self.prompt_launch_s - sum(seconds))
        terms = list(map(Term, PREFILL_TERMS, seconds, hidden))
        terms.append(Term(MATRICES, self.rows_s(tokens, present, info, left) if info else 0.0))
        return terms

    def chunk(self, tokens: int, present: int, info: DemandInfo, left: int = 0) -> Extra:
        """The next `tokens` of a prompt within an iteration, `present` before, `left` after."""
        policy_s = self.rows_s(tokens, present, info, left)
        counts = 1, tokens, int(not left)  # sequences, tokens, prompts that end
        if self._forward is not None:
            attention_s = self.prompt_attention_s(tokens, present)
            return Extra(0.0, 0.0, attention_s + self.sequence_s, policy_s, *counts)
        cost = self.cost.prefill(tokens, present)
        compute_s = (cost.matrices_s + cost.attention_s) / self.gpus
        kv_s = cost.memory_s / self.gpus - self.weights_s(tokens)
        return Extra(compute_s, kv_s, self.sequence_s, policy_s, *counts)

    def alone_s(self, work: Extra) -> float:
        """A step of parts of prompts in which no search decodes."""
        memory_s = self.weights_s(work.tokens) + work.kv_s if self._forward is None else 0.0
        computing, reading = map(float, _shown(work.compute_s, memory_s, self.overlap))
        seconds = work.compute_s * computing + memory_s * reading + work.serial_s
        seconds += self.pass_s(0, work.tokens, work.prompts)
        return max(seconds, self.prompt_launch_s) + work.policy_s

    def rows_s(self, tokens: int, present: int, info: DemandInfo, left: int = 0) -> float:
        """Seconds that reading a prompt's attention rows adds; `left` of its tokens follow."""
        if info.fused:
            return 0.0
        queries = max(0, info.row_queries - left)
        return self.cost.prompt_rows_s(tokens, present, queries, info.groups) / self.gpus

    def transfer_s(self, size_bytes: int, up: bool, memory: int = DDR) -> float:
        """A packed transfer, each GPU carrying its part over its own link."""
        key = size_bytes, up, memory
        found = self._transfers_s.get(key)
        if found is None:
            direction: Direction = "h2d" if up else "d2h"
            found = self.cost.stored_s(memory, size_bytes / self.gpus, direction)
            self._transfers_s[key] = found
        return found

    def nvme_s(self, size_bytes: int) -> float:
        """Reading or writing `size_bytes` on NVMe."""
        return size_bytes / self._nvme_bytes_per_s

    def workspace_bytes(self, demands: Sequence[SearchDemand], chunk: int) -> int:
        """HBM for the largest forward pass of these searches on each GPU."""
        largest = 0
        for demand in demands:
            passes = demand.ops[np.isin(demand.ops[:, 0], (Op.PREFILL, Op.RECOMPUTE)), 1]
            keys = int(passes.max(initial=0))
            tokens = min(keys, chunk) if chunk else keys
            needed = self.cost.workspace_bytes(tokens)
            if not (info := self._as_built(demand.info)).fused:
                needed += self.cost.prompt_rows_bytes(
                    tokens, keys - tokens, info.row_queries, info.groups
                )
            largest = max(largest, needed)
        return -(-largest // self.gpus)

    def built_in_bytes(self, priced: PricedProgram, pool_bytes: int) -> int:
        """HBM that a policy's build takes from a pool: the most that searches hold late counts."""
        built, geometry = self.integration(priced.info.policy), self.cost.geometry
        if built is None or not priced.pieces:
            return 0
        held = [p.hbm_bytes[0] + (p.iterations - 1) * p.hbm_bytes[1] for p in priced.pieces[-2:]]
        return built.pool_bytes(geometry, max(held) / geometry.kv_bytes_per_token, pool_bytes)

    # Decode iterations.

    def pieces(self, info: DemandInfo, table: np.ndarray) -> list[Piece]:
        """Price rows of `SearchDemand.pieces`."""
        count = table[:, 0]
        last = np.maximum(count - 1, 1)
        first = 1 + len(FIXED)
        fixed, linear = table[:, 1:first], table[:, first : first + len(LINEAR)]
        ends = linear + last[:, None] * table[:, first + len(LINEAR) :]
        asked = self._asked(info, np.concatenate([fixed, fixed]), np.concatenate([linear, ends]))
        pairs: list[list[tuple[Any, Any]]] = []
        for both in (
            *(self._part_s(part, asked) for part in PARTS),
            asked.kv_tokens * self.measured,
        ):
            begin, end = both[: len(table)], both[len(table) :]
            growth = (end - begin) / last
            pairs.append(list(zip(begin.tolist(), growth.tolist(), strict=True)))
        for name in ("hbm_bytes", "prefix_bytes"):
            at = first + LINEAR.index(name)
            held, grows = table[:, at], table[:, at + len(LINEAR)]
            pairs.append(list(zip(held.tolist(), grows.tolist(), strict=True)))
        side = [column[: len(table)].tolist() for column in self._side(info, asked)]
        policy = self.policy(info)
        decided = table[:, PIECE_COLUMNS.index("decided")].tolist()
        rows: Iterator[tuple[Any, ...]] = zip(
            count.tolist(), fixed[:, 0].tolist(), *pairs, *side, strict=True
        )
        launch_s = self.added_launch_s(info)
        return [
            Piece(*(*row, policy.longer(bool(decides)), launch_s))
            for row, decides in zip(rows, decided, strict=True)
        ]

    def iteration_terms(self, info: DemandInfo, table: np.ndarray) -> list[tuple[str, Term]]:
        """Terms of all iterations of pieces, of a search by itself, each with its plan's name."""
        asked = self._asked(info, *iterations(table))
        count = len(asked.sequences)
        each = [np.broadcast_to(term.seconds(self, asked), count) for term in self._terms]
        parts = {part: np.zeros(count) for part in (*PARTS, ATTENTION)}
        for term, seconds in zip(self._terms, each, strict=True):
            parts[term.part] = parts[term.part] + seconds
        reads = parts["kv"] + parts[ATTENTION]
        computing, reading = _shown(parts["compute"], reads, self.overlap)
        shown = {"compute": computing, "kv": reading, ATTENTION: reading}
        terms = []
        for term, seconds in zip(self._terms, each, strict=True):
            counted = float(np.sum(seconds * shown.get(term.part, 1.0)))
            hidden_s = max(0.0, float(seconds.sum()) - counted)
            terms.append((term.plan, Term(term.name, counted, hidden_s)))
        model_s = parts["compute"] * computing + reads * reading
        model_s = model_s + parts["dequantise"] + parts["serial"]
        least_s: Any = self.launch_s + self.added_launch_s(info)
        policy, decided = self.policy(info), asked.decided > 0
        extra_s = [self.policy_launch_s(policy.longer(decides)) for decides in (False, True)]
        least_s = least_s + np.where(decided, extra_s[1], extra_s[0])
        launches = np.maximum(0.0, least_s - model_s)
        model_s = model_s + launches
        terms.append(("decode: overhead of layers", Term(LAUNCHES, float(launches.sum()))))
        if info.recall == "stage":
            return [*terms, *((plan, Term(name, 0.0)) for name, plan in SIDE_TERMS.values())]
        side = self._side(info, asked)
        waited = np.where(side.stream_s > 0, np.maximum(0.0, side.stream_s - model_s), 0.0)
        weights_s = self._part_s("kv", asked, shared=True)  # they are read, and no attention
        gap_s = side.near_s - (reads - weights_s) - parts["dequantise"]
        waited = waited + np.where(side.near_s > 0, np.maximum(0.0, gap_s), 0.0)
        exposed_s = float(waited.sum())
        name, plan = SIDE_TERMS[info.recall]
        hidden_s = float(side.total_s.sum()) - exposed_s
        others = {each for _, each in SIDE_TERMS.values()} - {plan}
        terms += [(each, Term(name, 0.0)) for each in others]
        return [*terms, (plan, Term(name, exposed_s, hidden_s))]

    def reads(
        self, info: DemandInfo, table: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens that the first and last iteration of each piece read in a layer; its sequences."""
        fixed, linear = iterations(table)
        ends = np.cumsum(table[:, 0])
        asked = self._asked(info, fixed, linear)
        return asked.kv_tokens[ends - table[:, 0]], asked.kv_tokens[ends - 1], table[:, 1]

    def _asked(self, info: DemandInfo, fixed: np.ndarray, linear: np.ndarray) -> Asked:
        scale = ATTENDED_UNITS * info.groups * self.cost.geometry.layers
        sequences, decided, streamed, remote, window = fixed.T
        chooses = info.recall == "ondemand"  # what is read "remotely" are bounds then
        read, quantised, attended, rows, examined, _, _ = linear.T
        token_bytes = self.cost.geometry.full_bytes_per_token
        kv_tokens = (read - window) / token_bytes if token_bytes else 0.0 * read
        bytes_ = streamed, remote, window, read, quantised
        if self.integration(info.policy) is not None:  # kernels of engines read formats as such
            bytes_ = streamed, remote, window, read, 0 * quantised
        tokens = attended / scale, rows * info.eager / scale, examined, kv_tokens, sequences
        fused = not info.eager
        policy = self.policy(info)
        return Asked(policy, fused, sequences, decided, *bytes_, *tokens, chooses * remote)

    def _side(self, info: DemandInfo, q: Asked) -> _Side:
        """The work next to the GPU's in each iteration."""
        zeros, no_bytes = np.zeros(len(q.sequences)), np.zeros(len(q.sequences), dtype=np.int64)
        streamed = np.asarray(q.streamed_bytes, dtype=np.int64)
        none = _Side(zeros, zeros, zeros, zeros, streamed, no_bytes, no_bytes, no_bytes)
        if info.recall == "stage" or not (q.streamed_bytes.any() or q.remote_bytes.any()):
            return none
        cost, layers = self.cost, self.cost.geometry.full_layers
        sequences: Any = q.sequences  # an array, where the formulas speak of one number
        queries, partials = cost.near_message_bytes(sequences)
        link_s = cost.stream_s(streamed / self.gpus)
        if info.recall == "stream":
            buffers = np.asarray(cost.double_buffer_bytes(streamed))
            return none._replace(
                stream_s=link_s, link_s=link_s, total_s=link_s, buffer_bytes=buffers
            )
        away = q.remote_bytes > 0
        down = np.where(away, layers * queries, 0)
        window_s = np.asarray(cost.kv_read_s(q.window_bytes)) / self.gpus
        if info.recall == "near":
            total_s = cost.near_s(np.asarray(q.remote_bytes, dtype=float), sequences)
            near_s = np.where(away, total_s + window_s, 0.0)
            up = np.where(away, layers * partials, 0)
            return none._replace(near_s=near_s, total_s=total_s, down_bytes=down, up_bytes=up)
        total_s = cost.ondemand_s(streamed.astype(float))
        # The GPU attends to the fetched pages afterwards: that part of its attention hides nothing.
        near_s = total_s + np.asarray(cost.kv_read_s(streamed.astype(float))) / self.gpus
        near_s = np.where(near_s > 0, near_s + window_s, 0.0)
        buffers = -(-streamed // max(1, layers)) + q.remote_bytes.astype(np.int64)
        found = none._replace(near_s=near_s, link_s=link_s, total_s=total_s)
        return found._replace(buffer_bytes=buffers)


class _Side(NamedTuple):
    """Columns of `Piece`, arrays ``[n]``; `total_s` is what it takes, hidden or not."""

    stream_s: np.ndarray
    near_s: np.ndarray
    link_s: np.ndarray
    total_s: np.ndarray
    streamed_bytes: np.ndarray
    down_bytes: np.ndarray
    up_bytes: np.ndarray
    buffer_bytes: np.ndarray


def _shown(compute_s: Array, memory_s: Array, overlap: float) -> tuple[np.ndarray, np.ndarray]:
    """The shares of computing and of reading memory that are not hidden behind the other."""
    computes = np.asarray(compute_s) >= np.asarray(memory_s)
    return np.where(computes, 1.0, 1.0 - overlap), np.where(computes, 1.0 - overlap, 1.0)
