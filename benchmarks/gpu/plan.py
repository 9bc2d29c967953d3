"""What a run does, in order, with what each step should take on its GPU.

Everything is tried once at toy size before anything is measured, so that what is broken shows at
once.  Then what tells most comes first: every arm twice at 8,192 and 32,768 tokens, a trace of one
step of each, and once without CUDA graphs.  Longer prompts, more repeats and the longest contexts
take what time is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from arborsim.core.tiers import CAPTURED_RECALLS
from benchmarks.gpu import estimate
from benchmarks.gpu.estimate import Estimate

PARTS = (
    "start", "yardsticks", "smoke", "correctness", "calibration", "search", "trace", "context",
)  # fmt: skip
#: transformers' own caches, with SDPA.
YARDSTICKS = ("DynamicCache", "StaticCache")
MODES = ("auto", "off")  #: CUDA graphs where a step allows them, or none
REPEATS = 3
#: Prompt tokens.
SIZES = (8192, 32768, 65536)
TINY_SIZES = (64, 128)
#: Where CUDA graphs are compared with none, and a step is traced.
COMPARED, TRACED = (8192, 32768), (8192,)
#: Longer prompts, and repeats after these, wait for what time is left.
_LONG, SURE_REPEATS = 40000, 2
CHECKS = ("first checks", "more checks")
#: A smoke search: prompt, and new tokens per path.
SMOKE = (2048, 24)
TINY_SMOKE = (64, 8)
#: Files of a run, all in one folder.
RESULTS, PAGE, PROFILE, TRACES = "results.jsonl", "README.md", "profile.toml", "traces.zip"

_OFFLOAD = str(Path(__file__).with_name("offload.toml"))
_THOUGHTS = 4  # per path
_TRACED_TOKENS = 8
#: All smoke searches together, and a calibration, are stopped after so long.
_SMOKE_S, _CALIBRATION_S = 75.0, 140.0


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
        Arm("full", "full"),
        Arm("streaming-llm", "streaming-llm", *quarter),
        Arm("h2o per=shared", "h2o", *quarter, {"per": "shared"}),
        Arm("epikv", "epikv", *quarter, {"recent": few, "pin_prompt": "false"}),
        Arm("arkv", "arkv", *quarter, {"window": few}),
        Arm("arborkv (tree)", "arborkv", 1.0, 2.0, tree=True),
        Arm("half in DDR, stage", _OFFLOAD, 0.5, 0.5),
        Arm("half in DDR, stream", _OFFLOAD, 0.5, 0.5, recall="stream", longest=32768),
        Arm("half in DDR, near", _OFFLOAD, 0.5, 0.5, recall="near", longest=32768),
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
        On the plan's GPU.
    arm : Arm or None
    spare : bool
        Done with what time is left; the plan does not count on it.
    most_s : float
        It is stopped after so long; 0: by what is expected of it.
    """

    part: str
    facts: dict[str, Any]
    expected_s: float
    arm: Arm | None = None
    spare: bool = False
    most_s: float = 0.0

    @property
    def limit_s(self) -> float:
        """It is stopped after so long."""
        return self.most_s or max(20.0, 2.5 * self.expected_s)


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
        Where results go.
    command : str
    gpu : str
        Name of the shipped profile whose rates the minutes are planned with.
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
    gpu: str = "h100"

    @property
    def profile(self) -> Path:
        return self.folder / PROFILE

    @property
    def traces(self) -> Path:
        return self.folder / TRACES

    @property
    def smoke_load(self) -> Load:
        prompt, new = TINY_SMOKE if self.tiny else SMOKE
        return Load(prompt, new, self.prefill_block)

    @property
    def smoke(self) -> tuple[tuple[str, Arm | None, str], ...]:
        """Label, arm and mode of the smoke searches: all with graphs, and full without."""
        every = arms(self.smoke_load.new_tokens)
        return (
            *((name, None, "auto") for name in YARDSTICKS), *((a.label, a, "auto") for a in every),
            *((a.label, a, "off") for a in every if a.policy == "full"),
        )  # fmt: skip

    @property
    def timed_policies(self) -> tuple[str, ...]:
        """Policies whose searches a calibration times: those of the chains that drop tokens."""
        chains = [arm for arm in arms(self.new_tokens) if not arm.tree and arm.prompt_share < 1]
        return () if self.tiny else tuple(a.policy for a in chains if a.policy != _OFFLOAD)

    def load(self, prompt_tokens: int, new_tokens: int = 0) -> Load:
        return Load(prompt_tokens, new_tokens or self.new_tokens, self.prefill_block)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Everything that is wanted, in order."""
        found, compiled = [], set[str]()
        for step in self._all():
            if step.part not in self.parts:
                continue
            arm = step.facts.get("arm", "")
            if step.part == "smoke":
                compiled |= {label for label, *_ in self.smoke}
            elif arm and arm not in compiled and not self.tiny:  # in its first search
                compiled.add(arm)
                step = replace(step, expected_s=step.expected_s + self._first_s(arm))
            found.append(step)
        return tuple(found)

    @cached_property
    def _estimate(self) -> Estimate:
        return Estimate(self.gpu)

    def _all(self) -> Iterator[Step]:
        yield Step("start", {}, self._estimate.start_s)
        yield Step("yardsticks", {}, estimate.YARDSTICKS_S)
        yield Step("smoke", {}, self._smoke_s(), most_s=_SMOKE_S)
        yield Step("correctness", {"checks": CHECKS[0]}, estimate.CHECKS_S)
        yield Step("calibration", {}, estimate.CALIBRATION_S, most_s=_CALIBRATION_S)
        sure = [size for size in self.sizes if size <= _LONG]
        long = [size for size in self.sizes if size > _LONG]
        for repeat in range(1, min(self.repeats, SURE_REPEATS) + 1):
            yield from self._round(repeat, "auto", sure)
        yield from self._traces(self.sizes[:1] if self.tiny else TRACED)
        yield from self._round(1, "off", self.sizes[:1] if self.tiny else COMPARED)
        yield from map(_spare, self._more(sure, long))

    def _more(self, sure: Sequence[int], long: Sequence[int]) -> Iterator[Step]:
        """With what time is left."""
        yield Step("correctness", {"checks": CHECKS[1]}, estimate.MORE_CHECKS_S)
        yield from self._round(1, "auto", long)
        for repeat in range(SURE_REPEATS + 1, self.repeats + 1):
            yield from self._round(repeat, "auto", sure)
        for repeat in range(2, self.repeats + 1):
            yield from self._round(repeat, "auto", long)
        yield Step("context", {}, estimate.CONTEXT_S)

    def _traces(self, sizes: Sequence[int]) -> Iterator[Step]:
        for size, arm in product(sizes, arms(self.new_tokens)):
            if size in self.sizes and size <= arm.longest:
                seconds = self._search_s(arm, size, "auto", _TRACED_TOKENS) + estimate.TRACE_S
                yield Step("trace", {"arm": arm.label, "prompt_tokens": size}, seconds, arm)

    def _round(self, repeat: int, graphs: str, sizes: Iterable[int]) -> Iterator[Step]:
        for size in sizes:
            if size not in self.sizes:
                continue
            for label in YARDSTICKS if graphs == "auto" else ():
                facts = _facts(label, size, graphs, repeat)
                yield Step("search", facts, self._search_s(None, size, "off", self.new_tokens))
            for arm in arms(self.new_tokens):
                if size > arm.longest or (graphs == "off" and not arm.graphs):
                    continue
                if graphs == "off" and arm.recall == "stream" and size > COMPARED[0]:
                    continue  # copies take so long that they hide all launches
                seconds = self._search_s(arm, size, graphs, self.new_tokens)
                yield Step("search", _facts(arm.label, size, graphs, repeat), seconds, arm)

    def _search_s(self, arm: Arm | None, prompt: int, graphs: str, new_tokens: int) -> float:
        return 0.5 if self.tiny else self._estimate.search_s(arm, prompt, graphs, new_tokens)

    def _first_s(self, label: str) -> float:
        """Compiling, in the first search of an arm, and the short search in which it is done."""
        if label in YARDSTICKS:
            return estimate.SETUP_S
        return estimate.COMPILE_S * estimate.VARIANTS_PER_ARM + estimate.SETUP_S

    def _smoke_s(self) -> float:
        load = self.smoke_load
        return sum(
            self._search_s(arm, load.prompt_tokens, graphs, load.new_tokens)
            + (0.0 if self.tiny or arm is None else estimate.COMPILE_S * estimate.VARIANTS_PER_ARM)
            for _, arm, graphs in self.smoke
        )


def _facts(label: str, size: int, graphs: str, repeat: int) -> dict[str, Any]:
    return {"arm": label, "prompt_tokens": size, "graphs": graphs, "repeat": repeat}


def _spare(step: Step) -> Step:
    return replace(step, spare=True)


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
    last = f"{begun_s / 60:4.1f} min  {begun_s:.0f} s of {budget_s:.0f} s, on {plan.gpu}"
    return [*lines, last]


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
