"""Inference engines: what a step takes beyond its kernels, and how prompts are computed.

An engine is a TOML file (``engines/vllm.toml``).  Its constants say by how much a served step
differs from the sum of its kernels measured one by one; they are *fitted* to published serving runs
(`arborsim validate published`), or assumed.  A file that names another one as its ``base`` gives
what differs.  ``[gpus.b200]`` gives what differs on one GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

from msgspec import Meta

from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.records import check_ranges, located
from arborsim.core.sourced import Seconds, Sourced
from arborsim.machine.integration import OTHER, Integration

_Factor = Annotated[float, Meta(gt=0)]
_Count = Annotated[int, Meta(ge=1)]
_Amount = Annotated[int, Meta(ge=0)]
ADMISSIONS = ("demand", "reserve")


@dataclass(frozen=True)
class EngineProfile(Sourced):
    """An inference engine on a GPU."""

    name: str
    #: Which engine's kernels it runs: those of a table file, ``vllm``, ``sglang`` or ``trtllm``
    kernels: str
    #: Whether decode steps are CUDA graphs: one launch then, and copies to its inputs
    #: (`step_launches`).  Without, the host launches every kernel, which overlaps with the GPU's
    #: work: the longer of the two counts.
    graphs: bool
    launch_s: Seconds  # the host's time for one kernel
    #: Whether prompts are computed in the same steps as the tokens of searches that decode; if not,
    #: these wait.
    mixes_prefill: bool
    chunk_tokens: _Amount  # tokens of a step with prompts, at most; 0: prompts are own passes
    block_tokens: _Count  # KV slots of a block, by which prefixes are kept and given up
    step_s: Seconds  # each step longer than its kernels
    sequence_s: Seconds  # the same per sequence in it
    layer_s: Seconds  # each layer of a decode step longer than its kernels
    prefill_layer_s: Seconds  # the same in a step with prompts
    request_s: Seconds  # from a client's request until the scheduler knows of it, and back
    #: Time of its own kernels over those in the tables, never below their roofline: products
    #: with bf16 and with quantised weights, attention of decode steps, experts, all-reduces
    product_share: _Factor = 1.0
    quantised_share: _Factor = 1.0
    attention_share: _Factor = 1.0
    expert_share: _Factor = 1.0
    all_reduce_share: _Factor = 1.0  # of small messages, for which every GPU waits for the last
    all_reduce_bytes_share: _Factor = 1.0  # and of what larger messages take beyond that
    #: The same of products, experts and attention of prompts: clocks fall under a load that lasts
    prefill_share: _Factor = 1.0
    #: And of experts in mxfp4 beyond that, whose kernel for prompts is not the measured one
    mxfp4_prompt_share: _Factor = 1.0
    #: Kernels of a layer, whatever is read; what each search adds that reads one part of a cache;
    #: and what each further part adds (another format, tokens from DDR), and attention rows
    layer_launches: Annotated[float, Meta(ge=0)] = 0.0
    search_launches: Annotated[float, Meta(ge=0)] = 0.0
    part_launches: Annotated[float, Meta(ge=0)] = 0.0
    rows_launches: Annotated[float, Meta(ge=0)] = 0.0
    group_rows_launches: Annotated[float, Meta(ge=0)] = 0.0  # with several cache groups
    #: What a layer takes more by how its tokens in DDR are recalled than if they were staged, and
    #: for each format in DDR after the first
    recall_launches: Mapping[str, float] = field(default_factory=dict)
    recall_part_launches: Mapping[str, float] = field(default_factory=dict)
    #: Kernels of a step that its layers do not have: embedding, output head, choice of the token
    step_launches: Annotated[float, Meta(ge=0)] = 0.0
    graph_s: Seconds = 0.0  # the host's time for one graph; 0: as for a kernel
    #: Whether it is this project's own backend: `launch_s`, `graph_s` and `step_s` are then those
    #: of the machine's profile, if they were measured there, and a prompt's rows are `tiled_rows`
    as_measured: bool = False
    #: Passes over the residual stream of a layer by norms, rotations, activations and residuals
    elementwise_passes: Annotated[float, Meta(ge=0)] = 10.0
    #: Whether attention without a fused kernel copies KV heads to all query heads, and how often
    #: each probability is written or read, in bytes
    repeats_kv_heads: bool = False
    row_bytes: Annotated[float, Meta(ge=0)] = 0.0
    #: How a sequence gets a place: ``demand``, when its prompt fits, so that it may lose the place
    #: again; or ``reserve``, when the most fits that it will hold
    admission: str = "demand"
    #: By how much a layer of a decode step takes longer without all of the graphs (`GRAPHS`), and a
    #: step that is scheduled once the one before has ended
    graph_layer_s: Mapping[str, float] = field(default_factory=dict)
    synchronous_step_s: Seconds = 0.0
    #: Seconds between the lines of its log, which are what published peaks were read from
    log_s: Seconds = 10.0
    #: Passes over keys and values that a cache takes which is put together anew for every token
    cache_passes: Annotated[float, Meta(ge=0)] = 0.0
    #: How methods are built into it, by name; `OTHER` for those without an entry
    integrations: Mapping[str, Integration] = field(default_factory=dict)
    #: Beginnings of the versions that its constants were fitted to; empty: it has no versions
    versions: tuple[str, ...] = ()
    #: How far predictions were off where it was fitted to an endpoint (`arborsim observe`)
    observed: str = ""
    gpus: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, "engine")
        if self.admission not in ADMISSIONS:
            raise UnknownName("admission", self.admission, ADMISSIONS)
        known = {each.name for each in fields(self)}
        for gpu, given in self.gpus.items():
            for name in given:
                if name not in known:
                    raise UsageError(f"engine {self.name}, [gpus.{gpu}]: there is no {name}")

    def on(self, gpu: str) -> EngineProfile:
        """The engine on a GPU (``h100``, or ``h100+ddr5-2tb`` in a host)."""
        given: dict[str, Any] = dict(self.gpus.get(gpu.partition("+")[0], {}))
        return replace(self, gpus={}, **given)

    def integration(self, policy: str) -> Integration | None:
        """How a method is built into it; None if nothing is known of the engine's builds."""
        return self.integrations.get(policy, self.integrations.get(OTHER))

    def lost_s(self, built: Integration, layers: int) -> float:
        """By how much each layer of a step is longer for features that a build does without."""
        step_s = 0.0 if built.asynchronous else self.synchronous_step_s
        return self.graph_layer_s.get(built.graphs, 0.0) + step_s / layers

    def reduced_s(self, latency_s: float, bytes_s: float) -> float:
        """An all-reduce that was measured to take as long, for a small message and beyond it."""
        return self.all_reduce_share * latency_s + self.all_reduce_bytes_share * bytes_s

    def fitted_to(self, version: str) -> bool:
        """Whether constants were fitted to a version (``0.12.0``), or it is not known which."""
        return not (version and self.versions) or version.startswith(self.versions)

    @property
    def tiled_rows(self) -> bool:
        """Whether attention rows of a prompt are made again a tile at a time and added up.

        So they are next to fused attention, in blocks of `chunk_tokens` of the prompt.  An engine
        without it writes all of them out.
        """
        return self.as_measured or self.graphs

    def pass_launches(self, layers: int, graphs: bool) -> float:
        """Launches of a pass that all its searches share."""
        return self.step_launches + (0.0 if graphs else layers * self.layer_launches)

    def pass_launch_s(self, layers: int, graphs: bool) -> float:
        """The host's time for these."""
        more_s = self.graph_s - self.launch_s if graphs and self.graph_s else 0.0
        return self.pass_launches(layers, graphs) * self.launch_s + more_s

    def added_launches(
        self, layers: int, parts: int, rows: bool, recall: str = "stage", ddr_parts: int = 0,
        groups: int = 1,
    ) -> float:  # fmt: skip
        """Launches that a search adds: it reads `parts` of a cache, and writes attention rows out.

        `ddr_parts` of the parts lie in DDR, and are recalled as `recall` says.  Of several cache
        `groups` rows are taken apart.
        """
        if self.graphs:
            return 0.0
        further = self.part_launches * (parts - 1)
        if rows:
            further += self.rows_launches if groups == 1 else self.group_rows_launches
        if ddr_parts:
            each = self.recall_part_launches.get(recall, 0.0)
            further += self.recall_launches.get(recall, 0.0) + each * (ddr_parts - 1)
        return layers * (self.search_launches + further)

    @classmethod
    def from_table(
        cls, table: Mapping[str, Any], origin: str, base: EngineProfile | None = None
    ) -> EngineProfile:
        """An engine from a TOML table; a `UsageError` names what is missing or wrong."""
        with located(origin):
            return cls.over(base, table, 'base = "vllm" takes vLLM\'s')
