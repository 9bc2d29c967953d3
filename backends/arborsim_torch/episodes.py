"""Recording a trace: one episode per problem, and the metadata."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from arborsim.play.backends import ModelUsage, RecordProgress, RecordRequest, SearchRequest
from arborsim.play.given import GivenTree
from arborsim.searches import Search, make_search, search_options
from arborsim.trace.schema import Capture as Level
from arborsim.trace.schema import TraceInfo
from arborsim.trace.writer import TraceWriter
from arborsim_torch.batches import Ended, run_batched
from arborsim_torch.cache.layout import Layout
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.capture import Capture
from arborsim_torch.decoder import Pass
from arborsim_torch.given import record_tree
from arborsim_torch.hardware.facts import all_facts
from arborsim_torch.models import LoadedModel, device_name, geometry, rope_of
from arborsim_torch.prefixes import MOST_LOGITS
from arborsim_torch.recorder import EpisodeRecorder
from arborsim_torch.recording import EpisodeResult, Iterations
from arborsim_torch.recording_plan import RecordingPlan, expected_size
from arborsim_torch.reference.tasks import Problem
from arborsim_torch.sampling import Sampler

_PROGRESS_TOKENS = 64


def new_search(request: SearchRequest) -> Search:
    """The search of one problem: the one that was asked for, or one that grows a bank."""
    recipe = request.bank if isinstance(request, RecordRequest) else None
    return (
        make_search(request.search, **request.search_options) if recipe is None else recipe.make()
    )


@dataclass
class Tally:
    """Running totals of a recording."""

    episodes: int
    done: int = 0
    correct: int = 0
    judged: int = 0
    tokens: int = 0
    thoughts: int = 0
    reported: int = 0
    prompt_tokens: int = 0
    iterations: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    model_usage: tuple[ModelUsage, ...] = ()
    about: str = ""
    began: float = field(default_factory=time.perf_counter)

    def add(self, result: EpisodeResult) -> None:
        self.done += 1
        self.judged += result.correct is not None
        self.correct += bool(result.correct)
        self.thoughts += result.thoughts
        self.prompt_tokens += result.prompt_tokens
        self.iterations += result.iterations
        self.prefill_s += result.prefill_s
        self.decode_s += result.decode_s

    def progress(self) -> RecordProgress:
        seconds = time.perf_counter() - self.began
        counts = (self.done, self.episodes, self.correct, self.judged, self.tokens)
        speed = self.tokens / seconds
        return RecordProgress(*counts, speed, self.thoughts, self.model_usage, self.about)

    def timing(self) -> dict[str, float]:
        """The timing profile for the trace's metadata."""
        return {
            "decode_tokens_per_s": self.tokens / self.decode_s if self.decode_s else 0.0,
            "decode_iterations_per_s": self.iterations / self.decode_s if self.decode_s else 0.0,
            "prefill_tokens_per_s": (
                self.prompt_tokens / self.prefill_s if self.prefill_s else 0.0
            ),
            "decode_s": self.decode_s,
            "prefill_s": self.prefill_s,
            **{key: value for model in self.model_usage for key, value in model.timing().items()},
        }


def record_all(
    request: RecordRequest,
    loaded: LoadedModel,
    plan: RecordingPlan,
    info: TraceInfo,
    writer: TraceWriter,
    on_progress: Callable[[RecordProgress], None],
) -> RecordProgress:
    tally = Tally(plan.episodes, done=writer.num_episodes, about=expected_size(info, plan))

    def on_tokens(count: int) -> None:
        tally.tokens += count
        if tally.tokens - tally.reported >= _PROGRESS_TOKENS:
            tally.reported = tally.tokens
            on_progress(tally.progress())

    def recording(number: int) -> _Recording:
        recorder = EpisodeRecorder(
            model=loaded.model,
            source=plan.source,
            search=new_search(request),
            capture=capture_of(info),
            sampler=Sampler(request.temperature, (request.seed, number), request.top_p),
            seed=request.seed,
            max_tokens=plan.max_tokens,
            dedupe=request.dedupe and request.bank is None,
            on_tokens=on_tokens,
            cache=None if request.bank is None else TieredCache(Layout.of(loaded.model)),
            release=request.bank is not None,
            share_prefixes=info.extra.get("repeated_prefixes") == "computed once",
            reward=plan.reward,
            embedder=plan.embedder,
        )
        return _Recording(recorder, plan.source.problem(number))

    on_progress(tally.progress())
    wanted = range(request.first + writer.num_episodes, request.first + plan.episodes)
    for first in range(wanted.start, wanted.stop, request.batch):
        numbers = wanted[first - wanted.start :][: request.batch]
        if plan.trees is None:
            results = _results([recording(number) for number in numbers])
        else:
            results = [_given(loaded, plan, info, number) for number in numbers]
            tally.tokens += sum(result.tokens for result in results)
        for result in results:
            writer.write_episode(result.columns)
            tally.add(result)
            tally.model_usage = plan.model_usage()
            writer.update_timing(tally.timing())
            on_progress(tally.progress())
    return tally.progress()


@dataclass(frozen=True)
class _Recording:
    """A search that is recorded, alone or together with others (`arborsim_torch.batches`)."""

    recorder: EpisodeRecorder
    problem: Problem

    def steps(self) -> Iterations[EpisodeResult]:
        return self.recorder.steps(self.problem)

    def prepare(self, tokens: list[int]) -> Pass:
        return self.recorder.prepare(tokens)


def _results(together: list[_Recording]) -> list[EpisodeResult]:
    """The results of the searches, in their order."""
    if len(together) == 1:
        return [together[0].recorder.run(together[0].problem)]
    found: dict[int, EpisodeResult] = {}

    def done(search: _Recording, ended: Ended) -> None:
        assert isinstance(ended, EpisodeResult), "without a policy, no budget is too small"
        found[search.problem.index] = ended

    run_batched(together, len(together), done)
    return [found[search.problem.index] for search in together]


def _given(loaded: LoadedModel, plan: RecordingPlan, info: TraceInfo, number: int) -> EpisodeResult:
    assert plan.trees is not None
    return record_tree(loaded.model, plan.trees[number], capture_of(info), plan.source)


def capture_of(info: TraceInfo) -> Capture | None:
    """The capture of one episode of a trace with this metadata."""
    layers = (info.qkv_layers, info.attention_layer_ids, info.hidden_layers)
    return capture_at_level(info.capture, info.attention_top, *layers, info.embeddings)


def capture_at_level(
    level: Level,
    top: int,
    vector_layers: tuple[int, ...] = (),
    row_layers: tuple[int, ...] = (),
    hidden_layers: tuple[int, ...] = (),
    embeddings: bool = False,
) -> Capture | None:
    """The capture of one episode at this level; level `tree` may have embeddings."""
    if level is Level.TREE:
        return Capture(signals=frozenset()) if embeddings else None
    return Capture(top, vector_layers, row_layers, hidden_layers)


def trace_info(request: RecordRequest, loaded: LoadedModel, plan: RecordingPlan) -> TraceInfo:
    tree = request.capture is Level.TREE
    return TraceInfo(
        geometry=geometry(loaded),
        model=loaded.name,
        task=plan.source.name,
        search=new_search(request).name if plan.trees is None else _named(plan.trees),
        tokenizer=getattr(loaded.tokenizer, "name_or_path", "") or f"{plan.source.name} words",
        search_parameters=(
            {"tokens": "given", "first": request.first, **_chosen(request)}
            if plan.trees is not None
            else _search_parameters(request, plan)
        ),
        seed=request.seed,
        capture=request.capture,
        attention="none" if tree else "sparse" if plan.sparse else "dense",
        attention_top=request.attention_top if plan.sparse and not tree else 0,
        qkv_layers=plan.vector_layers,
        attention_layer_ids=plan.row_layers,
        hidden_layers=plan.hidden_layers,
        rope=rope_of(loaded.model),
        embeddings=tree and request.bank is not None,
        device=device_name(loaded.model.device),
        software={**all_facts(loaded.model), "pyarrow": pa.__version__},
        command=request.command,
        extra=_once(request, loaded)
        | ({"batch": str(request.batch)} if request.batch > 1 else {})
        | ({} if plan.trees is None else {"times": "unknown"}),
    )


def _named(trees: Sequence[GivenTree]) -> str:
    """The name of the searches: linear if none of them branches."""
    return "linear" if all(tree.straight for tree in trees) else "given"


def _once(request: RecordRequest, loaded: LoadedModel) -> dict[str, str]:
    """A bank of structure alone computes repeated prefixes once, if logits take little room."""
    small = loaded.model.config.vocab_size <= MOST_LOGITS
    if request.bank is None or request.capture is not Level.TREE or not small:
        return {}
    return {"repeated_prefixes": "computed once"}


def _search_parameters(request: RecordRequest, plan: RecordingPlan) -> dict[str, object]:
    return {
        **_parameters(request),
        "temperature": request.temperature,
        **_chosen(request),
        "max_tokens": plan.max_tokens,
        "noise": request.noise,
        "dead_penalty": request.dead_penalty,
        "value_floor": request.value_floor,
        "split": request.split,
        "first": request.first,
        **{f"task.{key}": value for key, value in request.task_options.items()},
        **_scoring_models(request, plan),
    }


def _chosen(request: RecordRequest) -> dict[str, object]:
    """Options of sampling and of prompts that are not what they are by default."""
    plain = SearchRequest(model="")
    names = ("top_p", "chat", "stop", "judge", "recipe")
    given = {name: getattr(request, name) for name in names}
    found = {name: value for name, value in given.items() if value != getattr(plain, name)}
    return found | ({"stop": list(request.stop)} if "stop" in found else {})


def _parameters(request: RecordRequest) -> dict[str, object]:
    """Parameters of the search, or of the bank; a bank keeps repeated thoughts."""
    search = new_search(request)
    dedupe = request.dedupe and not search.keeps_duplicates
    if request.bank is not None:
        return {**request.bank.parameters(), "dedupe": dedupe}
    options = {name: getattr(search, name) for name in search_options(request.search)}
    return {**options, "dedupe": dedupe}


def _scoring_models(request: RecordRequest, plan: RecordingPlan) -> dict[str, str | int]:
    """The models that score and embed thoughts, where it is not what does so by default."""
    found: dict[str, str | int] = {}
    if request.reward.name:
        usage = plan.reward.usage() if plan.reward is not None else None
        found["reward"] = request.reward.name if usage is None else usage.name
        for what in ("token", "label", "aggregate"):
            if usage is not None and getattr(request.reward, what):
                found[f"reward_{what}"] = getattr(request.reward, what)
    if plan.embedder is not None:
        found |= {"embed": plan.embedder.name, "embedding_size": plan.embedder.size}
    return found
