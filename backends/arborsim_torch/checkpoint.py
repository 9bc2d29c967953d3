"""Checks of a model's folder or id before anything heavy is imported or loaded.

Nothing here needs PyTorch: a model that cannot be loaded is refused at once, in one line that says
what is missing, where, and what to do.
"""

from __future__ import annotations

import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arborsim.core.errors import UnknownName, UsageError
from arborsim.machine.lookup import config_of, geometries_like
from arborsim_torch.gguf_header import check_gguf, is_gguf
from arborsim_torch.gguf_models import NAMED, check_named
from arborsim_torch.reference import MODELS

#: ``config.model_type`` of the models whose attention the decoder computes as they do.
#: Gemma 3's `gemma3` sees images, too: its language model, `gemma3_text`, is what runs.
_QWEN = ("qwen2", "qwen3", "qwen3_moe")
FAMILIES = ("gemma3", "gemma3_text", "llama", "mistral", "mixtral", "phi3", *_QWEN)
#: Why some others are not among them.
_WHY = {
    "gpt_oss": "its attention sinks take a share that no row of a trace shows",
    "gemma2": "it caps the logits of attention",
    "deepseek_v2": "its cache holds latent vectors, not keys and values of heads",
    "deepseek_v3": "its cache holds latent vectors, not keys and values of heads",
}
CONFIG = "config:"  #: before the name of a geometry: random weights
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.pkl")
_INDEX = "model.safetensors.index.json"
_REACH_S = 1.2  # how long to wait for the hub
_GIVE = "give the folder that model.save_pretrained or hf download made"


def is_plain(model: str, task: str = "") -> bool:
    """Whether that is a folder or an id of Hugging Face, with no problems of its own."""
    return not task and model not in MODELS and not model.startswith(CONFIG)


def check_checkpoint(model: str) -> None:
    """Refuse a name, folder, file or id from which no supported model can be loaded.

    Raises `UsageError` in one line: what is missing, where, and what to do.
    """
    option, path = f"--model {model}", Path(model)
    if model in NAMED:
        if cached_named(model) is None:
            check_named(NAMED[model])
        return
    if is_gguf(model) and not path.is_dir():
        check_gguf(option, path)
        return
    if path.exists():
        _check_folder(option, path)
        return
    if "/" not in model and os.sep not in model:
        raise UnknownName(
            "model", model, [*MODELS, *NAMED, "a folder with safetensors", "owner/model"]
        )
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise UsageError(f"{option}: no such folder")
    cached = _cached(model)
    if cached is not None:
        try:
            _check_folder(option, cached)
        except UsageError:
            if not _reachable():  # else the rest of it is fetched
                raise
    elif not _reachable():
        raise UsageError(
            f"{option}: no such folder, not in the local cache ({_hub()}), and {_endpoint()} "
            f"cannot be reached: where there is a network, hf download {model} --local-dir FOLDER, "
            f"then --model FOLDER{instead(model)}"
        )


def cached_named(model: str) -> Path | None:
    """Where transformers' cache has the model of that name whole, else None."""
    path = _cached(NAMED[model].hub)
    try:
        if path is not None:
            _check_folder(f"--model {model}", path)
    except UsageError:
        return None
    return path


def check_family(option: str, config: dict[str, Any]) -> None:
    """Refuse a configuration of a family that the decoder does not know, by name."""
    kind = str(config.get("model_type", ""))
    if kind in FAMILIES:
        return
    named = f"the {kind} family is not supported" if kind else "its config.json has no model_type"
    named += f" ({_WHY[kind]})" if kind in _WHY else ""
    raise UsageError(f"{option}: {named}; supported: {', '.join(FAMILIES)}")


def _check_folder(option: str, path: Path) -> None:
    """Configuration, tokeniser and weights, in the order of what they say about the folder."""
    if not path.is_dir():
        raise UsageError(f"{option}: that is a file: {_GIVE}")
    config = path / "config.json"
    if not config.is_file():
        raise UsageError(f"{option}: no model folder: it has no config.json{_what_else(path)}")
    check_family(option, _read(option, config))
    advice = f"; for memory and time alone, --model {CONFIG}{path} has random weights"
    check_safetensors(option, path, advice=advice)
    if not any((path / name).is_file() for name in _TOKENIZERS):
        raise UsageError(
            f"{option}: it has no tokenizer ({' or '.join(_TOKENIZERS[:2])}): copy those of the "
            f"model that it was made from, or AutoTokenizer.from_pretrained(ORIGINAL)"
            f".save_pretrained('{path}')"
        )


def check_files(option: str, folder: str, needed: Sequence[str], what: str) -> Path:
    """The folder, if it holds the `needed` files and its weights as safetensors.

    Raises `UsageError` in a line that says what is missing.
    """
    path = Path(folder)
    if not path.exists():
        raise UsageError(f"{option}: no such folder")
    if not path.is_dir():
        raise UsageError(f"{option}: expected a folder with {what}, but that is a file")
    for file in needed:
        if not (path / file).is_file():
            raise UsageError(f"{option}: not {what}: it has no {file}")
    check_safetensors(option, path, "**/*.safetensors")
    return path


def check_safetensors(
    option: str, path: Path, pattern: str = "*.safetensors", advice: str = ""
) -> None:
    """Refuse a folder without safetensors, or without one that its index names.

    `advice` is what else can be done where there are none.
    """
    index = path / _INDEX
    if index.is_file():
        shards = _read(option, index).get("weight_map")
        names = set(map(str, shards.values())) if isinstance(shards, dict) else set()
        missing = sorted(name for name in names if not (path / name).is_file())
        if missing:
            raise UsageError(
                f"{option}: {len(missing)} of the {len(names)} files with weights that {_INDEX} "
                f"names are missing, {missing[0]} first: finish the download"
            )
    if any(path.glob(pattern)):
        return
    pickled = any(next(path.rglob(kind), None) for kind in _PICKLED)
    do = f"finish the download, or model.save_pretrained(FOLDER){advice}"
    if pickled:
        do = "pickled weights can run code and are not loaded: load them where you trust them, "
        do += "and model.save_pretrained(FOLDER)"
    raise UsageError(f"{option}: it has no weights (*.safetensors): {do}")


def _read(option: str, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{option}: {path.name} cannot be read as JSON ({error})") from error
    if not isinstance(found, dict):
        raise UsageError(f"{option}: {path.name} holds no JSON object")
    return found


def _what_else(path: Path) -> str:
    """The other contents of a folder without a configuration, and what to do then."""
    if (path / "adapter_config.json").is_file():
        what = "merge it first, with peft's merge_and_unload, and save_pretrained"
        return f", but an adapter's (LoRA): {what}"
    if any(path.glob("*.gguf")):
        return f", but GGUF: --model {min(path.glob('*.gguf'))}"
    below = sorted(folder.parent for folder in path.glob("*/config.json"))
    below += sorted(folder.parent for folder in path.glob("snapshots/*/config.json"))
    if below:
        return f", but {below[0]} has: --model {below[0]}"
    return f": {_GIVE}"


def instead(model: str) -> str:
    """How to go on without weights, if geometries like that of the model are shipped."""
    like = [name for name in geometries_like(model) if config_of(name)["model_type"] in FAMILIES]
    if not like:
        return ""
    names = " or ".join(f"{CONFIG}{name}" for name in like)
    return f"; for memory and time alone, random weights will do: --model {names}"


def _hub() -> Path:
    """The local cache of Hugging Face, as huggingface_hub finds it."""
    home = (
        os.environ.get("HF_HOME")
        or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    )
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def _cached(model: str) -> Path | None:
    """Where the local cache has the model, if it has its configuration."""
    folder = _hub() / f"models--{model.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    path = folder / "snapshots" / revision
    return path if (path / "config.json").is_file() else None


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _reachable() -> bool:
    """Whether the hub answers at all, within a second; proxies are those of the environment."""
    switches = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    if any(switch.upper() in ("1", "ON", "YES", "TRUE") for switch in switches):
        return False
    answered: list[bool] = []

    def ask() -> None:
        request = urllib.request.Request(_endpoint(), method="HEAD")
        try:
            urllib.request.urlopen(request, timeout=_REACH_S).close()
        except urllib.error.HTTPError:  # an answer, whatever it says
            pass
        except (OSError, ValueError):
            return
        answered.append(True)

    # A name server that does not answer keeps no timeout, so the question is not waited for.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_REACH_S)
    return bool(answered)
