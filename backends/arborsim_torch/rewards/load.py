"""From the options of a request to the models that score and embed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from arborsim.core.errors import UnknownName, UsageError
from arborsim.play.backends import RewardChoice
from arborsim.searches.ranking import aggregate_of
from arborsim_torch.checkpoint import check_files
from arborsim_torch.models import LoadedModel
from arborsim_torch.rewards import texts
from arborsim_torch.rewards.base import Thought, check_weights
from arborsim_torch.rewards.model import Head, RewardModel

#: Rewards by name; anything else is a folder.
NAMED = ("verifier", "value")
_TEXTS, _STEPS, _TOKENS = "ForSequenceClassification", "ForTokenClassification", "ForCausalLM"
_VOCABULARIES = ("vocab.txt", "spiece.model", "merges.txt")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", *_VOCABULARIES)
_LABELS = "+,-"  # of a step-token model, as of Math-Shepherd


def check_choice(choice: RewardChoice) -> None:
    """Refuse what cannot work before any model is loaded: `UsageError` says what to do."""
    aggregate_of(choice.aggregate)
    if choice.name in ("", *NAMED):
        for option, given in (("token", choice.token), ("label", choice.label)):
            if given:
                raise UsageError(f"--reward-{option} {given} is for a reward model: --reward PATH")
        return
    if not Path(choice.name).exists() and "/" not in choice.name:
        raise UnknownName("reward", choice.name, [*NAMED, "a folder with a reward model"])
    path = check_files(f"--reward {choice.name}", choice.name, ("config.json",), "a reward model")
    _kind(_config(choice, path), choice)


def load_reward(choice: RewardChoice, loaded: LoadedModel, device: str) -> RewardModel:
    """Load the reward model of `choice`, for the thoughts of a searched model.

    Raises `UsageError`: it does not load, has no such head or tokens, or does not fit.
    """
    check_choice(choice)
    path, option = Path(choice.name), f"--reward {choice.name}"
    config = _config(choice, path)
    kind = _kind(config, choice)
    check_weights(option, path, device)
    model = _load(option, path, kind).to(device).eval()
    tokenizer = _tokenizer(option, path, model)
    ids_of = _ids_of(loaded, tokenizer)
    encoder = _encoder(option, choice, loaded, model, tokenizer, ids_of)
    head = (
        _tokens_head(choice, ids_of) if kind == _TOKENS else _classes_head(option, choice, config)
    )
    encode: Callable[[Thought], texts.Encoded] = (
        encoder.whole if kind == _TEXTS else encoder.by_step
    )
    pools, aggregate = kind == _TEXTS, aggregate_of(choice.aggregate)
    pad_id = _pad_id(model) if pools else 0
    return RewardModel(
        path.name, model, encode, head, pools=pools, aggregate=aggregate, pad_id=pad_id
    )


def _config(choice: RewardChoice, path: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = " ".join(str(error).split())[:300]
        raise UsageError(f"--reward {choice.name}: config.json cannot be read: {what}") from error


def _kind(config: Any, choice: RewardChoice) -> str:
    """Which of the three kinds of reward models this is, by its architecture."""
    name = next(iter(getattr(config, "architectures", None) or ()), "no architecture")
    kind = next((k for k in (_TEXTS, _STEPS, _TOKENS) if name.endswith(k)), None)
    option = f"--reward {choice.name}"
    if kind is None:
        raise UsageError(
            f"{option}: its config.json names {name}, which scores nothing: expected "
            f"*{_TEXTS}, *{_STEPS} or *{_TOKENS}"
        )
    if kind == _TOKENS and not choice.token:
        raise UsageError(
            f"{option}: {name} is a language model: name the token after which it scores a step, "
            "--reward-token"
        )
    if kind == _TEXTS and choice.token:
        raise UsageError(f"{option}: {name} scores whole texts: leave out --reward-token")
    if kind == _TEXTS and choice.aggregate != "last":
        raise UsageError(f"{option}: {name} scores whole texts: leave out --reward-aggregate")
    return kind


def _load(option: str, path: Path, kind: str) -> Any:
    import transformers

    options = {"use_safetensors": True, "trust_remote_code": False, "local_files_only": True}
    load = getattr(transformers, f"AutoModel{kind}").from_pretrained
    try:
        model, loading = load(path, dtype="auto", output_loading_info=True, **options)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        what = " ".join(str(error).split())[:300]
        raise UsageError(f"{option}: cannot be loaded: {what}") from error
    # transformers fills what is missing with random numbers, which would be random rewards.
    missing = sorted(loading["missing_keys"])
    if missing:
        raise UsageError(f"{option}: its weights lack {', '.join(missing[:3])}: no reward model")
    return model


def _tokenizer(option: str, path: Path, model: Any) -> Any:
    """The reward model's own tokeniser; None if the folder has none."""
    if not any((path / file).is_file() for file in _TOKENIZERS):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=False, local_files_only=True
        )
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        what = " ".join(str(error).split())[:300]
        raise UsageError(f"{option}: its tokeniser cannot be loaded: {what}") from error
    if not tokenizer.is_fast:
        raise UsageError(f"{option}: its tokeniser is a slow one: save it as tokenizer.json")
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise UsageError(
            f"{option}: its tokeniser has {len(tokenizer)} tokens, but the model only {rows}"
        )
    return tokenizer


def _ids_of(loaded: LoadedModel, tokenizer: Any) -> Callable[[str], list[int]]:
    """Token ids of a text that the reward model reads."""
    own = loaded.tokenizer if tokenizer is None else tokenizer
    if own is not None:
        return lambda text: list(own(text, add_special_tokens=False)["input_ids"])
    if loaded.task is not None:
        words = loaded.task.vocab
        return lambda text: [words[word] for word in text.split() if word in words.vocab]
    return lambda text: [int(text)] if text.isdigit() else []


def _encoder(
    option: str,
    choice: RewardChoice,
    loaded: LoadedModel,
    model: Any,
    tokenizer: Any,
    ids_of: Callable[[str], list[int]],
) -> texts.Encoder:
    step_id = texts.single_token(ids_of, choice.token, "--reward-token") if choice.token else None
    if tokenizer is not None:
        decode = texts.decoder_of(loaded)
        if decode is None:
            raise UsageError(
                f"{option}: it reads text, but {loaded.name} has no words: use a reward model "
                "without a tokeniser, which reads token ids"
            )
        return texts.Reencoded(tokenizer, decode, choice.token)
    rows = model.get_input_embeddings().num_embeddings
    own = int(loaded.model.config.vocab_size)
    if rows < own:
        raise UsageError(
            f"{option}: it has no tokeniser, so that it reads the ids of {loaded.name}, but knows "
            f"only {rows} of its {own}"
        )
    return texts.SharedIds(step_id)


def _tokens_head(choice: RewardChoice, ids_of: Callable[[str], list[int]]) -> Head:
    """P(good) against P(bad) as the next token."""
    good, comma, bad = (choice.label or _LABELS).partition(",")
    if not (good and comma and bad):
        raise UsageError(
            f"--reward-label {choice.label}: a step-token model needs two tokens, good and bad by "
            f"comma, e.g. {_LABELS}"
        )
    pair = tuple(texts.single_token(ids_of, text.strip(), "--reward-label") for text in (good, bad))
    return Head(pair, 0)


def _classes_head(option: str, choice: RewardChoice, config: Any) -> Head:
    """P(good class); the only logit's sigmoid if there is but one."""
    names = {int(number): str(name) for number, name in config.id2label.items()}
    if len(names) == 1:
        if choice.label:
            raise UsageError(
                f"{option}: it has one output and no classes: leave out --reward-label"
            )
        return Head()
    given = choice.label or ("1" if len(names) == 2 else "")
    good = next((i for i, name in names.items() if given in (name, str(i))), None)
    if good is None:
        known = ", ".join(f"{i} ({name})" for i, name in sorted(names.items()))
        raise UsageError(f"{option}: say which of its classes is good, --reward-label: {known}")
    return Head(tuple(sorted(names)), sorted(names).index(good))


def _pad_id(model: Any) -> int | None:
    """The padding of a batch's shorter texts; None if the model's configuration names none.

    Classifiers on top of a language model take the last token that is not this one.
    """
    config = model.config.get_text_config()
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    config.pad_token_id = -1  # no token at all: texts of equal length go together, unpadded
    return None
