"""Find a live backend by name, without importing any framework.

A backend is a class registered under the entry-point group ``arborsim.backends``; it can live in a
wheel of its own.  The core sees it only through the `Backend` protocol below.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from arborsim.core.errors import UnknownName, UsageError
from arborsim.trace.schema import Capture

if TYPE_CHECKING:
    from arborsim.bank.arms import Recipe
    from arborsim.live.request import LiveObserver, LiveRequest, ValidationObserver

GROUP = "arborsim.backends"

# Those that come with arborsim: their package, and the extra that installs what they need.
_SHIPPED = {"torch": ("arborsim_torch.backend:TorchBackend", "torch")}


#: Numbers of layers, or all of the model's.
LayerChoice = tuple[int, ...] | Literal["all"]


@dataclass(frozen=True)
class RewardChoice:
    """What scores thoughts.

    Attributes
    ----------
    name : str
        "verifier", "value", a folder with a reward model, or "" for the default of the problems.
    token : str
        Of a step-token model: the token after which it scores a step.
    label : str
        What is good: a class of a classifier, or "good,bad" tokens of a step-token model.
    aggregate : {"last", "min", "prod"}
        How the scores of a path's steps become one.
    """

    name: str = ""
    token: str = ""
    label: str = ""
    aggregate: str = "last"


@dataclass(frozen=True)
class ModelUsage:
    """What a model other than the searched one took.

    Attributes
    ----------
    role : {"reward", "embed"}
    name : str
    wall_s : float
    weight_bytes : int
    peak_kv_bytes : int
        Most that its keys and values took at once; 0 for encoders, which keep none.
    texts, tokens : int
        Computed; tokens with padding, and 0 where they are not counted.
    """

    role: str
    name: str
    wall_s: float
    weight_bytes: int
    peak_kv_bytes: int = 0
    texts: int = 0
    tokens: int = 0

    def timing(self) -> dict[str, float]:
        """What was counted, by its name in a trace's timing profile."""
        found = {
            "s": self.wall_s, "weight_bytes": self.weight_bytes,
            "peak_kv_bytes": self.peak_kv_bytes, "texts": self.texts, "tokens": self.tokens,
        }  # fmt: skip
        return {f"{self.role}_{what}": float(value) for what, value in found.items() if value}


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """Which problems to search, on which model, and how.

    Attributes
    ----------
    model : str
        A reference model's name, a folder, a model id, or ``config:NAME`` for random weights at a
        known geometry.
    task : str
        A reference task; "" for that of the model, or for plain prompts.
    prompts : Path or None
        JSON lines with a "prompt" each.
    search : str
    search_options : mapping
    episodes, first : int
        How many problems, starting with which; 0 episodes: as many as there are prompts.
    split : str
    temperature : float
        0 takes the most probable token.
    seed : int
    device, dtype : str
    max_tokens : int
        Generated tokens per path; 0 for the task's default.
    prompt_tokens : int
        Length of the random prompts of a model with random weights.
    noise, dead_penalty, value_floor : float
        Quality of the reward of tasks with a verifier, and the value of a state that is alive but
        has made no progress.
    thought_tokens : int
        Longest thought of a plain prompt, which otherwise ends at a newline.
    task_options : mapping
        E.g. ``lines`` of `chain`.
    reward : RewardChoice
    embed : str
        Folder of a sentence-transformers model that embeds thoughts; "" for the mean last hidden
        state of the searched model.
    dedupe : bool
        Give up a thought that repeats a sibling token by token.
    trust_remote_code : bool
    """

    model: str
    task: str = ""
    prompts: Path | None = None
    search: str = "linear"
    search_options: Mapping[str, Any] = field(default_factory=dict)
    episodes: int = 0
    first: int = 0
    split: str = "test"
    temperature: float = 0.0
    seed: int = 0
    device: str = "cpu"
    dtype: str = "auto"
    max_tokens: int = 0
    prompt_tokens: int = 0
    noise: float = 0.1
    dead_penalty: float = 1.0
    value_floor: float = 0.3
    thought_tokens: int = 64
    task_options: Mapping[str, Any] = field(default_factory=dict)
    reward: RewardChoice = RewardChoice()
    embed: str = ""
    dedupe: bool = True
    trust_remote_code: bool = False


@dataclass(frozen=True, kw_only=True)
class RecordRequest(SearchRequest):
    """What to record.

    Attributes
    ----------
    out : Path
    capture : Capture
    attention : {"auto", "dense", "sparse"}
    attention_top : int
        Positions kept per row when sparse.
    qkv_layers : tuple of int or "all"
        Empty for the two middle layers; "all" for all.
    attention_layers : tuple of int or "all"
        Layers whose own attention rows are stored besides the mean over all layers; "all" for
        all.
    bank : Recipe or None
        Grow a bank instead of running `search`.
    overwrite, resume : bool
    command : str
        For the trace's metadata.
    """

    out: Path
    capture: Capture = Capture.SIGNALS
    attention: str = "auto"
    attention_top: int = 256
    qkv_layers: LayerChoice = ()
    attention_layers: LayerChoice = ()
    bank: Recipe | None = None
    overwrite: bool = False
    resume: bool = False
    command: str = ""


@dataclass(frozen=True)
class RecordProgress:
    """How far a recording is.

    Attributes
    ----------
    episode, episodes : int
        Finished ones, and all of them.
    correct, judged : int
        Among the finished ones of this run.
    tokens : int
        Generated so far in this run.
    tokens_per_s : float
    thoughts : int
        Complete ones of the finished problems of this run.
    models : tuple of ModelUsage
        What reward and embedding models took in this run.
    """

    episode: int
    episodes: int
    correct: int
    judged: int
    tokens: int
    tokens_per_s: float
    thoughts: int = 0
    models: tuple[ModelUsage, ...] = ()


class Backend(Protocol):
    """A live model."""

    name: str

    def record(
        self, request: RecordRequest, on_progress: Callable[[RecordProgress], None]
    ) -> RecordProgress:
        """Record a trace; on KeyboardInterrupt leave the whole episodes and raise it again."""
        ...

    def live(self, request: LiveRequest, observer: LiveObserver) -> tuple[ModelUsage, ...]:
        """Run searches under policies (see `LiveRequest`); says what other models took."""
        ...

    def validate(self, request: LiveRequest, observer: ValidationObserver) -> None:
        """Search live and simulated at once; the request names a `machine`."""
        ...


def get_backend(name: str = "torch") -> Backend:
    """The backend called `name`.

    Raises
    ------
    UnknownName
    UsageError
        What it needs is not installed.
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
