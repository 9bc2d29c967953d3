"""Seconds of a method's decisions in an engine that no one has measured it in.

A method names the operations that an engine runs for it (`Policy.operations`): in every ``step``,
for the ``decision`` of a step, whatever the number of sequences that decide, and for each
``sequence`` that decides, where a build is known to take one after the other.  An operation is a
few kernels in each layer, which read and write a known number of bytes.  Its time is that of
launching them, and of the bytes of each sequence over the bandwidth; products take what measured
ones do.  Builds differ in ways that no declaration tells, so every time comes with the least and
the most that is plausible (`Built.range_s`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.geometry import Geometry
from arborsim.machine.integration import PolicySeconds
from arborsim.machine.profile import HardwareProfile

_SCORE_BYTES = 4  # scores and probabilities are fp32 between kernels
_ONCE = " once"  # follows the name of an operation that is run for all layers together
#: Bytes of a build that does not fuse its kernels, over those of one that does: by hand, as each
#: intermediate result is then written once and read once more
_UNFUSED = 2.0
#: When operations are run: in every step, for the decisions of a step, and for each of them
STEP, DECISION, SEQUENCE = TIMES = ("step", "decision", "sequence")


@dataclass(frozen=True)
class Operation:
    """The work of an operation in a layer, for each token that it looks at."""

    about: str
    kernels: int  # that a framework launches for it; fused, it is one
    cache: float = 0.0  # passes over keys and values; one half is the keys alone
    scores: float = 0.0  # passes over a score of each KV head
    rows: float = 0.0  # passes over a probability of each query head
    queries: int = 0  # whose products with the keys it works out
    pairs: float = 0.0  # passes over a number for each pair of tokens and KV head


#: Kernels as PyTorch and FlashAttention would run them, counted by hand
OPERATIONS = {
    "rows": Operation(
        "the newest query's attention, which fused kernels do not write",
        3,
        cache=0.5,
        rows=1,
        queries=1,
    ),
    "window": Operation("attention of the newest queries, pooled", 4, 0.5, 2, 16, 8),
    "sums": Operation("adding rows to running sums", 1, scores=2),
    "query": Operation("the newest query is kept", 1),
    "newest": Operation("statistics of the newest token", 2),
    "similarity": Operation("cosines of all pairs of keys", 8, cache=1, pairs=2),
    "norms": Operation("lengths of keys or values", 2, cache=0.5, scores=1),
    "mean key": Operation("cosines to the mean key", 4, cache=1, scores=1),
    "spread": Operation("spread of keys and values over channels", 8, cache=2, scores=2),
    "expected": Operation(
        "attention of queries to come, from their statistics", 6, cache=0.5, scores=2, queries=128
    ),
    "bounds": Operation("scores of pages by their bounds, which are charged apart", 3),
    "lowest": Operation("the lowest score", 1, scores=1),
    "top-k": Operation("the highest scores", 3, scores=4),
    "slot": Operation("the newest token takes a place that was given up", 1),
    "compaction": Operation("keys and values move together", 4, cache=2),
    "quantise": Operation("rounding, whose bytes are charged apart", 6),
}
#: Of a method that declares nothing
UNDECLARED = {STEP: ("rows", "sums"), DECISION: ("top-k", "compaction")}


def operations_of(policy: str) -> Mapping[str, Sequence[str]]:
    """Operations that a policy declares: the usual ones if it says nothing or is not known."""
    from arborsim.policies.registry import find  # looks for installed policies

    try:
        return find(policy).operations or UNDECLARED
    except UsageError:
        return UNDECLARED


def parsed(names: Sequence[str]) -> list[tuple[Operation, bool]]:
    """Operations by their names, and whether each is run once for all layers."""
    found = []
    for name in names:
        plain = name.removesuffix(_ONCE)
        if plain not in OPERATIONS:
            raise UnknownName("operation", plain, OPERATIONS)
        found.append((OPERATIONS[plain], plain != name))
    return found


@dataclass(frozen=True)
class Built:
    """Seconds of a method in an engine, worked out from its operations."""

    seconds: PolicySeconds
    #: By when, launching all kernels, and launching one for each operation
    launches: Mapping[str, tuple[float, float]]
    least_data: float  # the share of the seconds for bytes that the peak bandwidth takes

    def range_s(
        self, steps: float, deciding: float, decisions: float, data_s: float
    ) -> tuple[float, float, float]:
        """Seconds at the least, as simulated, and at the most, of a run.

        `deciding` of its `steps` have `decisions`.  Bytes, and what sequences take one by one, take
        `data_s`.  At the least every operation is one kernel at the peak bandwidth.  At the most
        decisions come one sequence after the other, and kernels read again what others have
        written.
        """
        (step_s, one_step_s), (all_s, one_all_s), (each_s, one_each_s) = self.launches.values()
        least_s = steps * one_step_s + deciding * (one_all_s + one_each_s)
        most_s = steps * step_s + decisions * (all_s + each_s)
        simulated_s = steps * step_s + deciding * all_s + data_s
        of_data_s = data_s - decisions * each_s
        return least_s + self.least_data * of_data_s, simulated_s, most_s + _UNFUSED * of_data_s


def build(
    operations: Mapping[str, Sequence[str]],
    profile: HardwareProfile,
    geometry: Geometry,
    gpus: int,
    kernel_s: float,
    flops_per_s: float,
) -> Built:
    """Price the operations of a method on one of `gpus`.

    A kernel takes `kernel_s` at least, and products run at `flops_per_s`.
    """
    found = {when: parsed(operations.get(when, ())) for when in TIMES}
    layers = max(1, geometry.full_layers)
    launches = {
        when: (
            kernel_s * sum(each.kernels * (1 if once else layers) for each, once in own),
            kernel_s * sum(1 if once else layers for _, once in own),
        )
        for when, own in found.items()
    }

    def bytes_s(when: str) -> float:
        return sum(
            _token_s(each, profile, geometry, flops_per_s) / (layers if once else 1)
            for each, once in found[when]
        )

    per_gpu = layers / gpus
    pairs = (each for when in (DECISION, SEQUENCE) for each, _ in found[when] if each.pairs)
    pairs_s = sum(_pair_s(each, profile, geometry, flops_per_s) for each in pairs)
    layer_s, all_s = (launches[when][0] / geometry.layers for when in (STEP, DECISION))
    seconds = PolicySeconds(
        decision_base_s=launches[SEQUENCE][0],
        decision_per_token_s=per_gpu * (bytes_s(DECISION) + bytes_s(SEQUENCE)),
        decision_per_pair_s=per_gpu * pairs_s,
        held_token_s=per_gpu * bytes_s(STEP),
        layer_s=layer_s,
        wide_layer_s=layer_s,
        deciding_layer_s=all_s,
    )
    return Built(seconds, launches, profile.mbu)


def _token_s(
    each: Operation, profile: HardwareProfile, geometry: Geometry, flops_per_s: float
) -> float:
    """Seconds of an operation in a layer, for a token: the longer of its bytes and its products."""
    moved = each.cache * geometry.layer_bytes_per_token
    moved += _SCORE_BYTES * (each.scores * _kv_heads(geometry) + each.rows * geometry.heads)
    multiplied = 2.0 * each.queries * geometry.heads * geometry.query_dim
    return max(moved / (profile.hbm_bytes_per_s * profile.mbu), multiplied / flops_per_s)


def _pair_s(
    each: Operation, profile: HardwareProfile, geometry: Geometry, flops_per_s: float
) -> float:
    """The same for a pair of tokens; products of pairs are in the type of the keys."""
    moved = each.pairs * geometry.kv_bytes_per_element * _kv_heads(geometry)
    multiplied = 2.0 * _kv_heads(geometry) * geometry.query_dim
    return max(moved / (profile.hbm_bytes_per_s * profile.mbu), multiplied / flops_per_s)


def _kv_heads(geometry: Geometry) -> int:
    return 1 if geometry.latent_dim else geometry.kv_heads
