"""Requests to a live backend and its reports, and how one is found.

A backend is a class registered under the entry-point group ``arborsim.backends``.  It can live in a
wheel of its own.  The core imports no framework and sees it only through the `Backend` protocol.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.installed import in_words
from arborsim.core.measurements import Measurements, check_figures
from arborsim.core.observations import Signal
from arborsim.core.tiers import DDR, HBM, MEMORIES, Tier
from arborsim.play.problem_sets import ProblemChoice
from arborsim.trace.schema import VECTORS, Capture

if TYPE_CHECKING:
    from arborsim.machine.machine import Machine
    from arborsim.play.episode import Cell
    from arborsim.play.given import GivenTree
    from arborsim.policies.base import Policy
    from arborsim.searches.arms import Recipe

GROUP = "arborsim.backends"
# Those that come with arborsim: their package, and the extra that installs what they need.
_SHIPPED = {"torch": ("arborsim_torch.backend:TorchBackend", "torch")}

#: Numbers of layers, or all of the model's.
LayerChoice = tuple[int, ...] | Literal["all"]


@dataclass(frozen=True)
class RewardChoice:
    """A reward for thoughts."""

    #: "verifier", "value", a folder with a reward model, or "" for the default of the problems
    name: str = ""
    token: str = ""  #: of a step-token model: the token after which it scores a step
    #: What is good: a class of a classifier, or "good,bad" tokens of a step-token model
    label: str = ""
    #: How scores of a path's steps become one: "last", "min", "prod" or "mean"
    aggregate: str = "last"


@dataclass(frozen=True)
class ModelUsage:
    """Time and memory of a model other than the searched one."""

    role: str  #: "reward" or "embed"
    name: str
    wall_s: float
    weight_bytes: int
    #: Most that its keys and values took at once; 0 for encoders, which keep none
    peak_kv_bytes: int = 0
    texts: int = 0  #: computed
    tokens: int = 0  #: computed, with padding; 0 where they are not counted

    def timing(self) -> dict[str, float]:
        """Counted figures, by their names in a trace's timing profile."""
        counted = ("weight_bytes", "peak_kv_bytes", "texts", "tokens")
        found = {"s": self.wall_s} | {name: getattr(self, name) for name in counted}
        return {f"{self.role}_{what}": float(value) for what, value in found.items() if value}

    @property
    def sentence(self) -> str:
        """Texts, seconds and memory of the model, in a line."""
        kind = {"reward": "reward model", "embed": "embedding model"}[self.role]
        kv = f", KV up to {self.peak_kv_bytes / 1e6:.3g} MB" if self.peak_kv_bytes else ""
        return (
            f"{kind} {self.name}: {self.texts} thoughts, {self.wall_s:.2f} s, weights "
            f"{self.weight_bytes / 1e6:.3g} MB{kv}"
        )


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """Which problems to search, on which model, and how."""

    #: A reference model's name, ``smollm2``, a folder, a GGUF file, a model id, or ``config:NAME``
    #: for random weights at a known geometry
    model: str
    task: str = ""  #: a reference task; "" for that of the model, or for plain prompts
    prompts: Path | None = None  #: JSON lines with a "prompt" each, ``hf:NAME`` or ``made:NAME``
    judge: str = ""  #: judges the answers of prompts; "" for none, or the recipe's
    #: The fields that hold "prompt" and "answer", where others do
    problem_fields: Mapping[str, str] = field(default_factory=dict)
    recipe: str = ""  #: the name of a benchmark whose prompts these are
    chat: bool = False  #: put prompts into the tokeniser's chat template
    search: str = "linear"
    search_options: Mapping[str, Any] = field(default_factory=dict)
    episodes: int = 0  #: problems; 0 for as many as there are prompts
    first: int = 0  #: number of the first problem
    split: str = "test"
    temperature: float = 0.0  #: 0 takes the most probable token
    top_p: float = 1.0  #: draw from the most probable tokens that make this much together
    seed: int = 0
    device: str = "cpu"
    dtype: str = "auto"
    max_tokens: int = 0  #: generated tokens per path; 0 for the task's default
    prompt_tokens: int = 0  #: length of the random prompts of a model with random weights
    #: Quality of the reward of tasks with a verifier: its noise (standard deviation), how well it
    #: sees a dead path, and the value of a state that is alive but has made no progress
    noise: float = 0.1
    dead_penalty: float = 1.0
    value_floor: float = 0.3
    #: Longest thought of a plain prompt, which otherwise ends with one of the `stop` strings
    thought_tokens: int = 64
    stop: tuple[str, ...] = ("\n",)
    task_options: Mapping[str, Any] = field(default_factory=dict)  #: e.g. ``lines`` of `chain`
    reward: RewardChoice = RewardChoice()
    #: Folder of a sentence-transformers model that embeds thoughts; "" for the mean last hidden
    #: state of the searched model
    embed: str = ""
    dedupe: bool = True  #: give up a thought that repeats a sibling token by token
    trust_remote_code: bool = False

    @property
    def problems(self) -> ProblemChoice | None:
        """The problems that prompts pose; None if there are none."""
        if self.prompts is None:
            return None
        return ProblemChoice(str(self.prompts), self.judge, self.problem_fields, self.recipe)


@dataclass(frozen=True, kw_only=True)
class RecordRequest(SearchRequest):
    """Searches to record, and what of them."""

    out: Path
    capture: Capture = Capture.SIGNALS
    attention: str = "auto"  #: "auto", "dense" or "sparse"
    attention_top: int = 256  #: positions kept per row when sparse
    qkv_layers: LayerChoice = ()  #: empty for the two middle layers
    #: Layers whose own attention rows are stored as well as the mean over all layers
    attention_layers: LayerChoice = ()
    hidden_layers: LayerChoice = ()  #: those whose outputs are stored
    bank: Recipe | None = None  #: grow a bank instead of running `search`
    #: JSON lines with "prompt" and "tokens" each: record these tokens instead of generating any
    teacher_forced: Path | None = None
    batch: int = 1  #: searches recorded together, each iteration in one forward pass
    overwrite: bool = False
    resume: bool = False
    command: str = ""  #: for the trace's metadata


def captured_for(policies: Iterable[Policy], layers: LayerChoice) -> dict[str, Any]:
    """The fields of a `RecordRequest` by which all that these policies read is recorded.

    `layers` are those whose vectors, rows or outputs are kept, where a policy reads any.
    """
    vectors = frozenset(VECTORS)
    needs = frozenset[Signal]().union(*(policy.reads() for policy in policies))
    return {
        "capture": Capture.QKV if needs & vectors else Capture.SIGNALS,
        "qkv_layers": layers if needs & vectors else (),
        "attention_layers": layers if Signal.LAYER_ATTENTION in needs else (),
        "hidden_layers": layers if Signal.HIDDEN in needs else (),
    }


@dataclass(frozen=True)
class RecordProgress:
    """How far a recording is.  All but `episode` and `episodes` counts this run only."""

    #: Finished ones, and all of them
    episode: int
    episodes: int
    #: Among the finished ones
    correct: int
    judged: int
    tokens: int  #: generated so far
    tokens_per_s: float
    thoughts: int = 0  #: complete ones of the finished problems
    models: tuple[ModelUsage, ...] = ()  #: what reward and embedding models took
    about: str = ""  #: how large the recording will be


@dataclass(frozen=True, kw_only=True)
class LiveRequest(SearchRequest):
    """Searches on a live model, each under every cell."""

    #: A share of a budget is of the tokens that the same search has under full retention, which is
    #: run first.
    cells: tuple[Cell, ...]
    recall: str = "stage"  #: how tokens in DDR are read: "stage", "stream", "near" or "ondemand"
    overlap: bool = True  #: False waits for every copy at once
    graphs: bool = True  #: on a GPU, replay decode steps as CUDA graphs wherever they allow it
    page_tokens: int = 16  #: slots by which pools grow and shrink
    attention_top: int = 0  #: positions kept of rows that a policy reads one by one; 0 for all
    #: Searches whose iterations are computed together, each on a cache of its own: more tokens per
    #: second, but the times of one search are then those of all
    batch: int = 1
    #: Policies decide, nothing is removed: one search serves all cells, each with a simulated
    #: machine of its own
    shadow: bool = False
    #: Tokens are masked in place of being removed: the answers of a live run, without its memory
    masked: bool = False
    machine: Machine | None = None  #: the simulated machine of a shadow run
    trace: Path | None = None  #: a shadow run also records this trace
    #: Captured layers of a shadow run; plans per layer or head are about these.  Otherwise all
    #: layers are captured.
    qkv_layers: LayerChoice = "all"
    command: str = ""

    def __post_init__(self) -> None:
        """Refuses policies whose tokens go where the live machine has nothing, or masks cannot."""
        if self.masked:
            self._check_masked()
            return
        for cell in () if self.shadow else self.cells:
            places = {t.memory for t in cell.policy.tiers if t != Tier.EVICTED}
            if below := sorted(MEMORIES[memory] for memory in places - {HBM, DDR}):
                raise UsageError(
                    f"policy {cell.policy.name} places tokens on {', '.join(below)}; the live "
                    "backend has HBM and DDR: replay it on a machine that has it"
                )

    def _check_masked(self) -> None:
        if self.shadow:
            raise UsageError(
                "--shadow removes nothing, --masked stands in for it: give one of them"
            )
        if self.search != "linear" or self.temperature:
            raise UsageError("--masked searches are linear and greedy: leave it out for others")
        for cell in self.cells:
            if cell.policy.recovers:
                raise UsageError(
                    f"--masked: {cell.policy.name} recomputes lost tokens, and masks do not: run "
                    "it live"
                )


_CLOCKS_S = 0.01  # seconds are differences of what several clocks say


@dataclass(frozen=True)
class LiveResult:
    """One search under one cell."""

    episode: int  #: number of the problem
    policy: str
    budget: str
    budget_tokens: int
    correct: bool | None  #: None if it was not judged, or if the budget is infeasible
    tokens: int  #: generated, on all branches together
    #: Of the same search under full retention, prompt included; 0 if unknown
    full_tokens: int
    wall_s: float
    #: Of the live machine; of the simulated one in a shadow run
    measured: Measurements = field(default_factory=Measurements)
    allocated_bytes: int = 0  #: largest size of the pools' tensors on the device, gaps included
    #: Largest memory of the framework's allocator on the device, weights included; 0 on the CPU
    device_peak_bytes: int = 0
    infeasible: str = ""  #: why the budget cannot hold the search; empty if it could
    #: Needed steps of the reasoning: those that are right in what was handed in, and how many there
    #: are; None where the task does not count them
    steps_right: int | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        """Refuses figures that no search can have."""
        whose = f"problem {self.episode}, {self.policy} at budget {self.budget}"
        check_figures(self.measured, whose, clocks_s=_CLOCKS_S)


@dataclass(frozen=True)
class LiveFacts:
    """The model, device and software behind the numbers."""

    model: str
    task: str
    device: str  #: the device's name
    dtype: str
    weight_bytes: int
    kv_bytes_per_token: int
    random_weights: bool  #: the answers mean nothing then
    software: dict[str, str]  #: versions, and the backend of the framework's attention
    #: What may change between parts of a run: git revision, driver, clocks, power limit; those of
    #: the run that began
    conditions: dict[str, str] = field(default_factory=dict)

    @property
    def about(self) -> str:
        """Both in words."""
        return in_words(self.software | self.conditions)


class Observer(Protocol):
    """Called while searches go on.  An exception raised here ends the run."""

    def began(self, facts: LiveFacts, episodes: int) -> None:
        """The model is loaded, and `episodes` problems will be searched."""

    def running(self, episode: int, what: str, tokens: int) -> None:
        """`tokens` more have been generated."""


class LiveObserver(Observer, Protocol):
    """Called while a live run goes on."""

    def wants(self, episode: int, cell: Cell) -> bool:
        """Whether this result is still missing (a resumed run has some)."""

    def full_tokens(self, episode: int) -> int:
        """`LiveResult.full_tokens` of an earlier run, or 0 if there is none."""

    def finished(self, result: LiveResult) -> None:
        """A search is complete."""


class ValidationObserver(Observer, Protocol):
    """Called while a validation goes on."""

    def wants(self, episode: int) -> bool:
        """Whether this problem is still missing (a resumed run has some)."""

    def checked(self, checks: tuple[Any, ...]) -> None:
        """One problem is complete under all policies and budgets: as `CellCheck`s."""


class TreeRecording(Protocol):
    """A trace that grows by one given tree at a time."""

    vocabulary: int  #: token ids are below this
    longest: int  #: tokens that a path may have

    def encode(self, text: str, is_prompt: bool) -> list[int]:
        """Token ids of a text; a `UsageError` without a tokeniser."""

    def write(self, tree: GivenTree) -> None:
        """Compute a tree, and store it: safe on disk on return."""

    def close(self) -> None:
        """Make the file of the whole searches."""


class Backend(Protocol):
    """A live model."""

    name: str

    def record(
        self, request: RecordRequest, on_progress: Callable[[RecordProgress], None]
    ) -> RecordProgress:
        """Record a trace.  On KeyboardInterrupt leave the whole episodes and raise it again."""

    def record_trees(
        self, request: RecordRequest, model: Any, tokenizer: Any, search: str
    ) -> TreeRecording:
        """Record given trees one by one, of a module or what the name of one loads."""

    def live(self, request: LiveRequest, observer: LiveObserver) -> tuple[ModelUsage, ...]:
        """Run searches under policies (see `LiveRequest`), and say what other models took."""

    def fidelity(self, request: Any, observer: Any) -> None:
        """Read documents under policies (see `arborsim.play.fidelity`)."""

    def validate(self, request: LiveRequest, observer: ValidationObserver) -> None:
        """Search live and simulated at once, on the request's `machine`."""


def get_backend(name: str = "torch") -> Backend:
    """The backend called `name`.

    Raises `UnknownName`, or `UsageError` if what it needs is not installed.
    """
    found = {point.name: point.value for point in entry_points(group=GROUP)}
    target = found.get(name) or _SHIPPED.get(name, ("", ""))[0]
    if not target:
        raise UnknownName("backend", name, {*found, *_SHIPPED})
    module, _, attribute = target.partition(":")
    try:
        backend: Backend = getattr(importlib.import_module(module), attribute)()
    except AttributeError as error:
        raise UsageError(f"the {name} backend is not installed properly: {error}") from error
    except ImportError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] == package and error.name != package:
            raise UsageError(
                f"the {name} backend is not installed properly: {error}: install it again"
            ) from error
        extra = _SHIPPED[name][1] if name in _SHIPPED else name
        raise UsageError(
            f"the {name} backend needs {error.name or module}, which is not installed: "
            f"pip install 'arborsim[{extra}]'"
        ) from error
    return backend
