"""The beginning of a GGUF file, read without PyTorch: what can be loaded, and why something cannot.

Layout (little-endian): magic, version, number of tensors, number of metadata.  Each of these has a
key, a type and a value.  Name, dimensions, type and offset of each tensor follow, then, aligned,
the data.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from arborsim.core.errors import UsageError

#: Architectures whose weights transformers turns into those of a supported family, as tested.
ARCHITECTURES = ("llama", "qwen2", "qwen3")
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_MOST = 1 << 24  # more metadata, tensors or dimensions than that is nonsense
_GIVE = "give the folder of safetensors that it was made from"
#: Of packages that reading the weights needs.
PIP = "pip install --no-deps gguf accelerate"

_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA = _CONTRACTIONS + _WORDS + r"|\p{N}{1,3}" + _REST
_QWEN = _CONTRACTIONS + _WORDS + r"|\p{N}" + _REST
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
#: How a text is cut before bytes are merged, by the name that a file has for it: one regular
#: expression after the other, each on what the one before has left.
CUTS: dict[str, tuple[str, ...]] = {
    "smollm": (r"\p{N}", _GPT2),  # digits one by one
    "gpt-2": (_GPT2,),
    "default": (_GPT2,),
    "llama-bpe": (_LLAMA,),
    "llama3": (_LLAMA,),
    "qwen2": (_QWEN,),
    "deepseek-r1-qwen": (_QWEN,),
}


@dataclass(frozen=True)
class GgufHeader:
    """The metadata and shapes of a file: texts and numbers by key, lengths for arrays."""

    about: Mapping[str, Any]
    tensors: Mapping[str, tuple[int, ...]]  #: shapes, the innermost dimension first

    @property
    def cuts(self) -> tuple[str, ...]:
        """Regular expressions of its tokeniser's first step, none where that has no such step."""
        of_bytes = self.about.get("tokenizer.ggml.model") == "gpt2"
        return CUTS[str(self.about.get("tokenizer.ggml.pre", "default"))] if of_bytes else ()


def is_gguf(model: str) -> bool:
    """Whether that is the name of a GGUF file."""
    return model.lower().endswith(".gguf")


def check_gguf(option: str, path: Path) -> GgufHeader:
    """The file's header, if its weights and its tokeniser can be loaded.

    Raises `UsageError` in one line: what is wrong, and what to do.
    """
    if not path.is_file():
        raise UsageError(f"{option}: no such file")
    try:
        header = read_header(path)
    except (OSError, ValueError, struct.error, IndexError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"{option}: no whole GGUF file ({why}): download it again") from error
    problem = _problem(header)
    if problem:
        raise UsageError(f"{option}: {problem}: {_GIVE}")
    if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        raise UsageError(f"{option}: GGUF needs {' and '.join(missing)}: {PIP}")
    return header


def _problem(header: GgufHeader) -> str:
    """Why it cannot be loaded as it computes, "" if it can."""
    about = header.about
    kind = str(about.get("general.architecture", ""))
    if kind not in ARCHITECTURES:
        return f"the {kind or 'unnamed'} family is not supported as GGUF, {_listed()} are"
    if about.get(f"{kind}.expert_count"):
        return "a mixture of experts is not supported as GGUF"
    scaling = str(about.get(f"{kind}.rope.scaling.type", "none"))
    if scaling != "none" or "rope_freqs.weight" in header.tensors:
        return "its scaled rotary positions would be lost on the way out of GGUF"
    model, cut = about.get("tokenizer.ggml.model"), about.get("tokenizer.ggml.pre", "default")
    if model is None:
        return "it has no tokenizer"
    if model not in ("gpt2", "llama") or (model == "gpt2" and cut not in CUTS):
        return f"its tokenizer ({model}, {cut}) is not supported, {', '.join(CUTS)} are"
    embedded, tokens = header.tensors.get("token_embd.weight"), about.get("tokenizer.ggml.tokens")
    if embedded is None:
        return "it has no token_embd.weight"
    if not isinstance(tokens, int) or tokens > embedded[-1]:
        return f"its tokenizer has {tokens} tokens, the model {embedded[-1]}: they do not fit"
    return ""


def _listed() -> str:
    return f"{', '.join(ARCHITECTURES[:-1])} and {ARCHITECTURES[-1]}"


def read_header(path: Path) -> GgufHeader:
    """The header of a file.  Raises ValueError, struct.error or OSError if it is not whole."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).header()


class _Reader:
    """Values of a file, one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 4

    def header(self) -> GgufHeader:
        version, tensors, entries = self._next("IQQ")
        if version not in (2, 3):
            raise ValueError(f"version {version}")
        about = {}
        for _ in range(self._plausible(entries)):
            key = self._text()
            about[key] = self._value(self._number("I"))
        shapes, ends = {}, 0
        for _ in range(self._plausible(tensors)):
            name = self._text()
            shapes[name] = tuple(self._next(f"{self._plausible(self._number('I'))}Q"))
            _, offset = self._next("IQ")
            ends = max(ends, offset)
        alignment = int(about.get("general.alignment", 32)) or 1
        if -(-self._at // alignment) * alignment + ends >= len(self._data):
            raise ValueError("it ends before its last weights")
        return GgufHeader(about, shapes)

    def _next(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return found

    def _number(self, form: str) -> int:
        return int(self._next(form)[0])

    def _plausible(self, count: int) -> int:
        if count > _MOST:
            raise ValueError(f"it counts {count} entries")
        return count

    def _text(self) -> str:
        length = self._number("Q")
        if self._at + length > len(self._data):
            raise ValueError("a text goes beyond its end")
        self._at += length
        return self._data[self._at - length : self._at].decode(errors="replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            return self._next(_form(kind))[0]
        inner, count = self._next("IQ")
        if inner in (_STRING, _ARRAY):
            for _ in range(self._plausible(count)):
                self._value(inner)
        else:
            self._at += self._plausible(count) * struct.calcsize(f"<{_form(inner)}")
        return count


def _form(kind: int) -> str:
    if kind not in _NUMBERS:
        raise ValueError(f"a value of type {kind}")
    return _NUMBERS[kind]
