"""How a method is built into an engine: what it takes from steps, from memory, and per decision.

The same algorithm costs what its build makes of it.  A build may leave the engine's CUDA graphs or
its asynchronous scheduling, keep queries for every sequence that may run, and decide for one
sequence after the other.  These facts stand in the engine's file, under
``[integrations.NAME]``, *fitted* to published runs (`arborsim validate policies`).  Methods that no
one has measured in it are priced from their operations (``[integrations.other]``,
`arborsim.machine.operations`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from arborsim.core.errors import UnknownName
from arborsim.core.geometry import Geometry
from arborsim.core.records import check_ranges
from arborsim.core.sourced import Seconds, Sourced

#: The entry of methods that have none of their own.
OTHER = "other"
#: Decode steps as one CUDA graph, as one for the layers between two attentions, or
#: every kernel launched by the host
GRAPHS = ("full", "piecewise", "eager")


class Longer(NamedTuple):
    """By how much each layer of a pass takes longer under a policy."""

    one_s: float = 0.0  # of one token
    several_s: float = 0.0  # of several, beyond what they take under full retention


NO_LONGER = Longer()


@dataclass(frozen=True)
class PolicySeconds:
    """The time of a policy on the host: taking signals in, scoring, deciding."""

    iteration_s: Seconds = 0.0  # every decode iteration, also those after which nothing is decided
    lane_s: Seconds = 0.0  # the same for each sequence that decodes: its newest token's signals
    #: Whenever the search turns to other sequences, once and for each of them: thoughts end and
    #: begin, with the signals that were held back until then
    turn_s: Seconds = 0.0
    turn_lane_s: Seconds = 0.0
    #: A decision: once, and per token it looks at
    decision_base_s: Seconds = 0.0
    decision_per_token_s: Seconds = 0.0
    #: Not on the host: by how much each layer of an iteration takes longer than under full
    #: retention, for its attention rows, its formats, and entries that are not in order
    layer_s: Seconds = 0.0
    #: The same where several sequences decode together, beyond what full retention takes then
    wide_layer_s: Seconds = 0.0

    #: By how much each layer takes longer in an iteration after which any search decides
    deciding_layer_s: Seconds = 0.0
    #: A decision, per pair of tokens that it looks at, and an iteration, per token that it attends
    #: to
    decision_per_pair_s: Seconds = 0.0
    held_token_s: Seconds = 0.0

    def longer(self, decides: bool = True) -> Longer:
        """By how much layers take longer in an iteration after which it decides, or does not."""
        deciding_s = self.deciding_layer_s if decides else 0.0
        return Longer(self.layer_s + deciding_s, self.wide_layer_s + deciding_s)

    def decision_s(self, examined_tokens: Any) -> Any:
        """One decision over `examined_tokens`; a number or an array."""
        each_s = self.decision_per_token_s + self.decision_per_pair_s * examined_tokens
        return self.decision_base_s + each_s * examined_tokens

    def observing_s(self, sequences: Any, held_tokens: Any = 0.0) -> Any:
        """One iteration of n sequences (a number or an array), without a decision."""
        return self.iteration_s + self.lane_s * sequences + self.held_token_s * held_tokens

    def turning_s(self, sequences: float) -> float:
        """One turn to n sequences."""
        return self.turn_s + self.turn_lane_s * sequences


@dataclass(frozen=True)
class Integration(Sourced):
    """A method in an engine."""

    graphs: str = "full"  # what is left of the engine's CUDA graphs, see `GRAPHS`
    asynchronous: bool = True  # whether the engine still schedules a step during the one before
    #: By how much each layer of a decode step is longer for the method's own kernels, once for the
    #: batch
    layer_s: Seconds = 0.0
    decision_layer_s: Seconds = 0.0  # a decision for one sequence, in each layer
    #: Newest queries that are kept for each sequence that may run (R-KV's window)
    query_tokens: Annotated[int, Meta(ge=0)] = 0
    #: Sequences that these are kept for; 0: as many as the pool holds under the budget
    query_slots: Annotated[int, Meta(ge=0)] = 0
    #: Other memory that it takes from the pool
    workspace_bytes: Annotated[int, Meta(ge=0)] = 0
    #: Whether seconds are those of the method's operations, in the place of measured ones
    from_operations: bool = False
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, "integration")
        if self.graphs not in GRAPHS:
            raise UnknownName("graphs", self.graphs, GRAPHS)

    def seconds(self, layers: int) -> PolicySeconds:
        """Measured seconds of a policy in a model of `layers`."""
        return PolicySeconds(
            decision_base_s=layers * self.decision_layer_s,
            layer_s=self.layer_s,
            wide_layer_s=self.layer_s,
        )

    def pool_bytes(self, geometry: Geometry, held_tokens: float, pool_bytes: int) -> int:
        """Memory that it takes from a pool in which a sequence comes to hold `held_tokens`."""
        query_bytes = geometry.layers * geometry.heads * geometry.head_dim
        query_bytes *= self.query_tokens * geometry.weight_bytes_per_element
        slots: float = self.query_slots
        if query_bytes and not slots:
            slots = pool_bytes / max(1.0, held_tokens * geometry.kv_bytes_per_token)
        return int(slots * query_bytes) + self.workspace_bytes
