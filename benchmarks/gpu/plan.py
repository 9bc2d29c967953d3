"""What a run does, in order, with what each step should take on an H200.

The first round searches every arm once at every length, what tells most first; then once without
CUDA graphs, a trace of one step of each, and the repeats that intervals need.  When the time ends
early it is repeats that are missing, not policies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from arborsim.core.tiers import CAPTURED_RECALLS
from arborsim.machine.cost import CostModel
from arborsim.machine.lookup import load_geometry, load_profile

PARTS = ("start", "yardsticks", "correctness", "calibration", "search", "trace", "context")
YARDSTICK = "DynamicCache"  #: transformers' own cache and SDPA
MODES = ("auto", "off")  #: CUDA graphs where a step allows them, or none
REPEATS = 3
#: Prompt tokens.
SIZES = (8192, 32768, 65536)
TINY_SIZES = (64, 128)
#: Where CUDA graphs are compared with none, and a step is traced.
COMPARED, TRACED = (8192, 32768), (8192,)
#: The last repeat of longer prompts waits for what time is left.
_LONG = 40000
CHECKS = ("first checks", "more checks")

_OFFLOAD = str(Path(__file__).with_name("offload.toml"))
_THOUGHTS = 4  # per path
_ROWS = frozenset({"h2o", "arkv", "arborkv"})  # they read attention of the prompt
#: Measured prompts take longer than the roofline of a datasheet says; searches are also set up.
_SLOWER, _SLOWER_WITH_ROWS, _SETUP_S = 2.0, 3.0, 0.6
_FIRST_S = 1.2  # kernels are compiled, and graphs captured, in an arm's first search
_EAGER_STEP_S = 0.022  # what launching Llama-3.1-8B's kernels one by one takes
_TRACED_TOKENS = 8
_LINK_BYTES_PER_S = 45e9


@dataclass(frozen=True)
class Load:
    """What is searched.

    Attributes
    ----------
    prompt_tokens, new_tokens : int
        New tokens per path.
    prefill_block : int
        Prompt tokens per forward pass.
    """

    prompt_tokens: int
    new_tokens: int
    prefill_block: int

    @property
    def source_options(self) -> tuple[int, int, int]:
        return self.prompt_tokens, self.new_tokens, -(-self.new_tokens // _THOUGHTS)


@dataclass(frozen=True)
class Arm:
    """A policy, its settings, and its budget as a share of the prompt and of one path's tokens.

    Attributes
    ----------
    label : str
    policy : str
        A name or a TOML file.
    prompt_share, new_share : float
    settings : mapping
    recall : str
        How tokens in DDR are read.
    tree : bool
        A tree of thoughts; else one path.
    longest : int
        Longer prompts are left out: every step carries half of the cache over the link.
    """

    label: str
    policy: str
    prompt_share: float = 1.0
    new_share: float = 1.0
    settings: Mapping[str, str] = field(default_factory=dict)
    recall: str = "stage"
    tree: bool = False
    longest: int = 1 << 30

    @property
    def graphs(self) -> bool:
        """Whether its steps can be captured: where the host attends, or chooses, it waits."""
        return self.policy != _OFFLOAD or self.recall in CAPTURED_RECALLS

    def budget_tokens(self, load: Load) -> int:
        return int(self.prompt_share * load.prompt_tokens + self.new_share * load.new_tokens)


def arms(new_tokens: int) -> tuple[Arm, ...]:
    """What is compared, in order; windows and intervals are shares of what is generated."""
    few = str(max(4, new_tokens // 6))
    quarter = (0.25, 0.25)
    return (
        Arm("half in DDR, stage", _OFFLOAD, 0.5, 0.5),
        Arm("half in DDR, stream", _OFFLOAD, 0.5, 0.5, recall="stream", longest=32768),
        Arm("half in DDR, near", _OFFLOAD, 0.5, 0.5, recall="near", longest=32768),
        Arm("arborkv (tree)", "arborkv", 1.0, 2.0, tree=True),
        Arm("arkv", "arkv", *quarter, {"window": few}),
        Arm("full", "full"),
        Arm("streaming-llm", "streaming-llm", *quarter),
        Arm("h2o", "h2o", *quarter),
        Arm("epikv", "epikv", *quarter, {"recent": few, "pin_prompt": "false"}),
    )


@dataclass(frozen=True)
class Step:
    """One entry of the plan.

    Attributes
    ----------
    part : str
        Which handler does it.
    facts : dict
        What is done; with `part`, what tells it from other steps.
    expected_s : float
        On an H200.
    arm : Arm or None
    spare : bool
        Done with what time is left; the plan does not count on it.
    """

    part: str
    facts: dict[str, Any]
    expected_s: float
    arm: Arm | None = None
    spare: bool = False

    @property
    def limit_s(self) -> float:
        """It is stopped after so long."""
        return max(20.0, 2.5 * self.expected_s)


@dataclass(frozen=True)
class Plan:
    """What is run, and how large it is.

    Attributes
    ----------
    model : str
        With random weights: ``config:`` and a geometry or a file.
    device : str
    tiny : bool
        Few and small checks; no time is expected of anything.
    sizes : tuple of int
        Prompts of the searches, in this order.
    new_tokens : int
        Generated per path.
    prefill_block : int
        Prompt tokens per forward pass.
    repeats : int
    context_step, longest : int
        Contexts are probed in multiples of the one up to the other.
    parts : tuple of str
        Which of `PARTS` are wanted.
    folder : Path
        Where results go: a profile and traces.
    command : str
    """

    model: str
    device: str
    tiny: bool
    sizes: tuple[int, ...]
    new_tokens: int
    prefill_block: int
    repeats: int
    context_step: int
    longest: int
    parts: tuple[str, ...]
    folder: Path
    command: str

    @property
    def profile(self) -> Path:
        return self.folder / "profile.toml"

    def load(self, prompt_tokens: int, new_tokens: int = 0) -> Load:
        return Load(prompt_tokens, new_tokens or self.new_tokens, self.prefill_block)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Everything that is wanted, in order."""
        return tuple(step for step in self._all() if step.part in self.parts)

    def _all(self) -> Iterator[Step]:
        yield Step("start", {}, 18.0)
        yield Step("yardsticks", {}, 5.0)
        yield Step("correctness", {"checks": CHECKS[0]}, 35.0)
        yield Step("calibration", {}, 33.0)
        compared, traced = (self.sizes,) * 2 if self.tiny else (COMPARED, TRACED)
        yield from self._round(1, "auto", self.sizes)
        yield from self._round(1, "off", compared)
        for size, arm in product(traced, arms(self.new_tokens)):
            if size in self.sizes and size <= arm.longest:
                seconds = self._search_s(arm, size, "auto", _TRACED_TOKENS) + 0.5
                facts = {"arm": arm.label, "prompt_tokens": size}
                yield Step("trace", facts, seconds, arm)
        later: list[Step] = []
        for repeat in range(2, self.repeats + 1):
            for step in self._round(repeat, "auto", self.sizes):
                if step.facts["prompt_tokens"] > _LONG and repeat == self.repeats:
                    later.append(replace(step, spare=True))
                else:
                    yield step
        yield Step("correctness", {"checks": CHECKS[1]}, 22.0)
        yield from later
        yield Step("context", {}, 30.0, spare=True)

    def _round(self, repeat: int, graphs: str, sizes: Sequence[int]) -> Iterator[Step]:
        for size in sizes:
            if size not in self.sizes:
                continue
            facts = {"arm": YARDSTICK, "prompt_tokens": size, "graphs": graphs, "repeat": repeat}
            if graphs == "auto":
                yield Step("search", facts, self._search_s(None, size, "off", self.new_tokens))
            for arm in arms(self.new_tokens):
                if size > arm.longest or (graphs == "off" and not arm.graphs):
                    continue
                if graphs == "off" and arm.recall == "stream" and size > COMPARED[0]:
                    continue  # copies take so long that they hide all launches
                seconds = self._search_s(arm, size, graphs, self.new_tokens)
                seconds += _FIRST_S * (repeat == 1 and size == self.sizes[0])
                yield Step("search", {**facts, "arm": arm.label}, seconds, arm)

    def _search_s(self, arm: Arm | None, prompt: int, graphs: str, new_tokens: int) -> float:
        """A search on an H200, after its datasheet; slower where a step is bound by launches."""
        if self.tiny:
            return 0.5
        cost, share = _h200(), arm.prompt_share if arm else 1.0
        policy = arm.policy if arm else ""
        slower = _SLOWER_WITH_ROWS if policy in _ROWS else _SLOWER
        seconds = _SETUP_S + slower * cost.prefill_s(prompt)
        kept_bytes = share * prompt * cost.geometry.kv_bytes_per_token
        step_s = 2.0 * float(cost.decode_s(1, prompt, kept_bytes))
        if graphs == "off" or (arm is not None and not arm.graphs):
            step_s = max(step_s, _EAGER_STEP_S)
        if arm is not None and arm.recall != "stage":  # the other half, at every step
            step_s += kept_bytes / _LINK_BYTES_PER_S
        paths = 2.0 if arm is not None and arm.tree else 1.0  # iterations of a tree
        return seconds + paths * new_tokens * step_s


def _h200() -> CostModel:
    return CostModel(load_profile("h200"), load_geometry("llama-3.1-8b"))


def timetable(plan: Plan, budget_s: float) -> list[str]:
    """The plan's minutes as lines of text: every round by length, and what else there is."""
    lines, begun_s = [], 0.0
    for name, steps in _together(plan.steps):
        seconds = sum(step.expected_s for step in steps)
        least = min(step.limit_s for step in steps)
        many = f"{len(steps)} searches, each" if len(steps) > 1 else ""
        stopped = f"{many} stopped after {least:.0f} s{' or more' if many else ''}".strip()
        at = "if left" if steps[0].spare else f"{begun_s / 60:4.1f} min"
        lines.append(f"{at:>8} {seconds:5.0f} s  {name} ({stopped})")
        begun_s += 0.0 if steps[0].spare else seconds
    return [*lines, f"{begun_s / 60:4.1f} min  {begun_s:.0f} s of {budget_s:.0f} s"]


def expected_s(plan: Plan) -> float:
    """Seconds that the plan counts on, without what is done if time is left."""
    return sum(step.expected_s for step in plan.steps if not step.spare)


def _together(steps: Sequence[Step]) -> list[tuple[str, list[Step]]]:
    """Neighbours of one round and length, with a name."""
    found: list[tuple[str, list[Step]]] = []
    for step in steps:
        facts = step.facts
        name = ": ".join([step.part, *map(str, facts.values())])
        if step.part in ("search", "trace"):
            mode = "" if facts.get("graphs", "auto") == "auto" else ", without graphs"
            what = f"round {facts['repeat']}" if step.part == "search" else "traces"
            name = f"{what}, {facts['prompt_tokens']:,} tokens{mode}"
        if not found or found[-1][0] != name or found[-1][1][0].spare != step.spare:
            found.append((name, []))
        found[-1][1].append(step)
    return found
