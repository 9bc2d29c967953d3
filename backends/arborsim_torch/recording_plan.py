"""The plan of a recording, checked against the model and the problems before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arborsim.core.errors import UsageError
from arborsim.play.backends import LayerChoice, ModelUsage, RecordRequest
from arborsim.play.given import PROMPT, GivenTree
from arborsim.play.problem_sets import ProblemSet
from arborsim.trace.schema import PER_LAYER, TraceInfo
from arborsim.trace.schema import Capture as Level
from arborsim_torch.capture import middle_layers
from arborsim_torch.given_file import Words, read_searches
from arborsim_torch.models import LoadedModel, eos_ids
from arborsim_torch.reference.tasks import Problem
from arborsim_torch.rewards.base import Embedder, Reward
from arborsim_torch.rewards.embed import load_embedder
from arborsim_torch.rewards.exact import OwnValue
from arborsim_torch.rewards.load import load_reward
from arborsim_torch.sources import PromptSource, RandomSource, Source, TaskSource
from arborsim_torch.text_task import prompt_ids

DENSE_UP_TO = 4096  #: longest path, in tokens, whose attention rows "auto" stores whole
_SPARSE_TOP = 256  # positions kept per attention row of longer ones
DEFAULT_STOP = ("\n",)
_DEFAULT_EPISODES = 8
_TREE_BYTES = 64  # of a token's place, text and times in the trace
_DEFAULT_MAX_TOKENS = 512  # of plain prompts
_DEFAULT_PROMPT_TOKENS = 512  # of random ones


def attention_top(path_tokens: int) -> int:
    """Positions kept per attention row of paths of `path_tokens` tokens; 0 for all of them."""
    return 0 if path_tokens <= DENSE_UP_TO else _SPARSE_TOP


@dataclass(frozen=True)
class RecordingPlan:
    """The consequences of a request once the model is there.

    `reward` and `embedder` are None where the source scores thoughts and the model embeds them.
    """

    source: Source
    episodes: int
    max_tokens: int
    path_tokens: int  #: most of one path, prompt included
    sparse: bool
    vector_layers: tuple[int, ...]
    row_layers: tuple[int, ...]
    hidden_layers: tuple[int, ...] = ()
    reward: Reward | None = None
    embedder: Embedder | None = None
    trees: Sequence[GivenTree] | None = None  #: searches whose tokens are given

    def model_usage(self) -> tuple[ModelUsage, ...]:
        """The usage of the reward and embedding models so far."""
        used = [model.usage() for model in (self.reward, self.embedder) if model is not None]
        return tuple(usage for usage in used if usage is not None)


def make_plan(
    request: RecordRequest, loaded: LoadedModel, prompts: ProblemSet | None
) -> RecordingPlan:
    """The plan of `request` for a loaded model.

    Raises `UsageError`: there are fewer problems, layers or positions than asked for.
    """
    source = _source(request, loaded, prompts)
    trees = None if request.teacher_forced is None else given_trees(request, loaded, source)
    available = source.count(request.first)
    if trees is not None:
        available = max(0, len(trees) - request.first)
    if available == 0:
        raise UsageError(f"--first {request.first}: there are no problems from that number on")
    episodes = request.episodes or available or _DEFAULT_EPISODES
    if request.episodes == 0 and prompts is None and request.teacher_forced is None:
        episodes = min(episodes, _DEFAULT_EPISODES)
    if available is not None and episodes > available:
        raise UsageError(
            f"--episodes {episodes}: only {available} problems from number {request.first} on"
        )
    numbers = range(request.first, request.first + episodes)
    max_tokens, path_tokens = _lengths(request, loaded, source, numbers, trees)
    return plan_for(request, loaded, source, path_tokens, episodes, max_tokens, trees)


def plan_for(
    request: RecordRequest,
    loaded: LoadedModel,
    source: Source,
    path_tokens: int,
    episodes: int,
    max_tokens: int,
    trees: Sequence[GivenTree] | None,
) -> RecordingPlan:
    """The plan for paths of at most `path_tokens`; raises `UsageError` as `make_plan` does."""
    sparse = request.attention == "sparse" or (
        request.attention == "auto" and path_tokens > DENSE_UP_TO
    )
    layers: tuple[int, ...] = ()
    if request.capture is Level.QKV:
        chosen = request.qkv_layers or middle_layers(loaded.model.config.num_hidden_layers)
        layers = _existing("--qkv-layers", chosen, loaded)
    row_layers = _row_layers(request, loaded, path_tokens)
    embedder = load_embedder(request.embed, request.device) if request.embed else None
    hidden = _captured_layers("--hidden-layers", request.hidden_layers, request, loaded)
    of_layers = (layers, row_layers, hidden)
    reward = _reward(request, loaded, source)
    lengths = (episodes, max_tokens, path_tokens)
    return RecordingPlan(source, *lengths, sparse, *of_layers, reward, embedder, trees)


def _lengths(
    request: RecordRequest,
    loaded: LoadedModel,
    source: Source,
    numbers: range,
    trees: Sequence[GivenTree] | None,
) -> tuple[int, int]:
    """Tokens that a path may generate, and the longest path with its prompt."""
    if trees is not None:  # given, and checked path by path to fit the model
        ends = [(len(t.nodes[PROMPT].tokens), max(t.lengths)) for t in (trees[n] for n in numbers)]
        return max(end - prompt for prompt, end in ends), max(end for _, end in ends)
    longest = max(len(source.problem(i).prompt) for i in numbers)
    max_tokens = min(request.max_tokens or source.max_tokens, loaded.max_positions - longest)
    if max_tokens < 1:
        raise UsageError(
            f"the longest prompt has {longest} tokens, but {loaded.name} takes "
            f"{loaded.max_positions} positions: nothing is left to generate"
        )
    return max_tokens, longest + max_tokens


def _reward(request: RecordRequest, loaded: LoadedModel, source: Source) -> Reward | None:
    """The reward of thoughts; None for the source itself."""
    name = request.reward.name
    if not name:
        return None
    if name == "verifier":
        if not isinstance(source, TaskSource) or not source.judged:
            raise UsageError(
                f"--reward verifier: nothing can verify the answers of {loaded.name}: give the "
                "folder of a reward model, or for prompts a --judge"
            )
        return source.verifier
    if name == "value":
        if loaded.task is None or loaded.task.value_readout is None:
            raise UsageError(
                f"--reward value: {loaded.name} states no value of its own, as game24 does: give "
                "the folder of a reward model"
            )
        return OwnValue()
    return load_reward(request.reward, loaded, request.device)


def _row_layers(request: RecordRequest, loaded: LoadedModel, path_tokens: int) -> tuple[int, ...]:
    layers = _captured_layers("--attention-layers", request.attention_layers, request, loaded)
    if layers and path_tokens > DENSE_UP_TO:
        raise UsageError(
            f"--attention-layers stores whole rows, of paths up to {DENSE_UP_TO} tokens, but these "
            f"may reach {path_tokens}: lower --max-tokens, or leave it out"
        )
    return layers


def _captured_layers(
    option: str, chosen: LayerChoice, request: RecordRequest, loaded: LoadedModel
) -> tuple[int, ...]:
    layers = _existing(option, chosen, loaded)
    if layers and request.capture is Level.TREE:
        raise UsageError(f"{option} needs --capture signals or --capture qkv")
    return layers


def _existing(option: str, layers: LayerChoice, loaded: LoadedModel) -> tuple[int, ...]:
    """The layers that were asked for, if the model has them."""
    count = loaded.model.config.num_hidden_layers
    if layers == "all":
        return tuple(range(count))
    wrong = [layer for layer in layers if not 0 <= layer < count]
    if wrong:
        raise UsageError(f"{option} {wrong[0]}: {loaded.name} has layers 0 to {count - 1}")
    return layers


def _source(request: RecordRequest, loaded: LoadedModel, prompts: ProblemSet | None) -> Source:
    if request.prompt_tokens and not loaded.random_weights:
        raise UsageError("--prompt-tokens is for models with random weights (config:NAME)")
    if loaded.tokenizer is None and (request.chat or request.stop != DEFAULT_STOP):
        raise UsageError(
            f"--chat and --stop are for a model with a tokeniser: {loaded.name} has none"
        )
    if request.teacher_forced is not None:
        return of_given(request, loaded)
    if loaded.task is not None:
        if prompts is not None:
            raise UsageError(f"--prompts is for plain models: {loaded.name} has its own problems")
        return _of_task(request, loaded)
    if loaded.random_weights:
        if prompts is not None:
            raise UsageError("random weights understand no prompts: use --prompt-tokens")
        prompt_tokens = request.prompt_tokens or _DEFAULT_PROMPT_TOKENS
        lengths = (prompt_tokens, request.max_tokens or _DEFAULT_MAX_TOKENS, request.thought_tokens)
        return RandomSource(loaded.model.config.vocab_size, *lengths)
    if prompts is None:
        raise UsageError(f"--model {request.model} has no task: give --prompts FILE.jsonl")
    most = request.max_tokens or prompts.recipe.max_tokens or _DEFAULT_MAX_TOKENS
    return _of_prompts(request, loaded, prompts, most)


def _of_task(request: RecordRequest, loaded: LoadedModel) -> TaskSource:
    assert loaded.task is not None
    return TaskSource(
        loaded.task, request.split, request.noise, request.dead_penalty, request.value_floor
    )


def _of_prompts(
    request: RecordRequest, loaded: LoadedModel, prompts: ProblemSet, max_tokens: int
) -> PromptSource:
    lengths, ends = (max_tokens, request.thought_tokens), (request.stop, request.chat)
    return PromptSource(prompts, loaded.tokenizer, eos_ids(loaded), *lengths, *ends)


def of_given(request: RecordRequest, loaded: LoadedModel) -> Source:
    """The reader of given tokens."""
    longest = loaded.max_positions
    if loaded.task is not None:
        return _of_task(request, loaded)
    if loaded.tokenizer is not None:
        return _of_prompts(request, loaded, ProblemSet("prompts", ()), longest)
    return RandomSource(loaded.model.config.vocab_size, 1, longest, request.thought_tokens)


def given_trees(request: RecordRequest, loaded: LoadedModel, source: Source) -> list[GivenTree]:
    """The searches of a file; text is tokenised here, ids are taken as they are."""
    assert request.teacher_forced is not None
    words = words_of(loaded, request.chat, source)
    return [search.tree(words) for search in read_searches(request.teacher_forced)]


def words_of(loaded: LoadedModel, chat: bool, source: Source | None = None) -> Words:
    """The tokens of a text; `source` says where the thoughts of a chain end."""
    tokenizer = loaded.tokenizer

    def encode(text: str, is_prompt: bool) -> list[int]:
        if tokenizer is None:
            raise UsageError(f"{loaded.name} has no tokeniser of text: give token ids")
        if is_prompt:
            return prompt_ids(tokenizer, text, chat)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def cut(prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
        assert source is not None
        problem = Problem(source.name, "given", 0, tuple(prompt), None)
        generated, ends = list[int](), [0]
        for count, token in enumerate(tokens, 1):
            generated.append(token)
            ended = source.is_thought_end(problem, generated, count - ends[-1])
            if ended or count == len(tokens):
                ends.append(count)
        return ends[1:]

    return Words(encode, cut, loaded.model.config.vocab_size, loaded.max_positions)


def expected_size(info: TraceInfo, plan: RecordingPlan) -> str:
    """How many bytes a token takes in the trace, before compression, in a line."""
    shape, path, tree = info.geometry, plan.path_tokens, info.capture is Level.TREE
    rows = 6 * info.attention_top or path  # float16, half of the path in the mean
    vectors = (shape.heads + 2 * shape.kv_heads) * shape.head_dim * 2
    parts = {
        "the tree": _TREE_BYTES,
        "attention rows": 0 if tree else rows,
        "rows of layers": 2 * path * len(info.attention_layer_ids),
        "statistics of layers": 0 if tree else 2 * len(PER_LAYER) * shape.layers,
        "hidden states": 2 * shape.hidden * len(info.hidden_layers),
        "queries, keys and values": vectors * len(info.qkv_layers),
    }
    each, most = sum(parts.values()), max(parts, key=lambda name: parts[name])
    return (
        f"recording about {each / 1e3:.3g} kB per token before compression, most of it {most}; "
        f"a path of {path} tokens takes {each * path / 1e6:.3g} MB"
    )
