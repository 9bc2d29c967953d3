"""The command line that does what a call does, for the metadata of its results.

It names what differs from the defaults, and nothing that leaves the results alone: where they are
written, how many processes share the work.  So the command and the call that do the same write the
same bytes.
"""

from __future__ import annotations

import inspect
import os
import shlex
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from arborsim.products.choices import listed, setting_texts

#: Names of options where they are not those of the keywords.
_OPTIONS = {
    "policies": "policy",
    "budgets": "budget",
    "settings": "set",
    "algorithms": "algorithm",
    "widths": "width",
    "gpus": "gpu",
    "prompt": "prompt-tokens",
}
#: Given several times rather than by comma.
_REPEATED = {"settings", "calibration", "stop", "answers", "vary"}
#: What changes nothing in the results; of the URL of a database also because of its password.
_SILENT = {
    "workers", "progress", "pictures", "out", "resume", "overwrite", "storage", "study",
}  # fmt: skip


def equivalent(
    name: str,
    call: Callable[..., Any],
    given: Mapping[str, Any],
    more: Mapping[str, Any] = MappingProxyType({}),
    options: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """``"arborsim replay t.parquet --policy h2o"``; of what no option says, the call in Python.

    `given` are the arguments of `call` by name; those that are not by keyword alone are input
    files.  `more` are the defaults of its further keywords, `options` names of options that differ
    from those of other commands.
    """
    parameters = list(inspect.signature(call).parameters.values())
    defaults = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
    values = {key: given.get(key, default) for key, default in (defaults | dict(more)).items()}
    changed = {
        key: values[key]
        for key, default in (defaults | dict(more)).items()
        if key not in _SILENT and _differs(values[key], default)
    }
    files = [given[each.name] for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    inputs = [each for file in files if file is not None for each in listed(file)]
    if not all(map(_is_plain, (inputs, *changed.values()))):
        shown = [
            repr(_text(each)) if _is_plain(each) else f"<{getattr(each, 'name', each)}>"
            for each in inputs
        ]
        positional = shown if len(shown) < 2 else [f"[{', '.join(shown)}]"]
        keywords = [f"{key}={value!r}" for key, value in changed.items()]
        return f"arborsim.{name}({', '.join([*positional, *keywords])})"
    inputs = [_text(each) for each in inputs]
    words = ["arborsim", name, *inputs]
    for key, value in changed.items():
        words += _words(key, value, option_of(options.get(key, key)))
    return shlex.join(words)


def option_of(keyword: str) -> str:
    """The option of a keyword: ``"--policy"`` of ``"policies"``."""
    return f"--{_OPTIONS.get(keyword, keyword).replace('_', '-')}"


def _differs(value: Any, default: Any) -> bool:
    return bool(_texts(value) != _texts(default))


def _texts(value: Any) -> list[str]:
    """What an option would be given."""
    if isinstance(value, Mapping):
        return setting_texts(value)
    return [part for each in listed(value) for part in _text(each).split(",")]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.12g}"
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)


def _is_plain(value: Any) -> bool:
    """Whether an option can say it."""
    if isinstance(value, Mapping):
        return True
    plain = (str, int, float, bool, os.PathLike)
    return all(isinstance(each, plain) or hasattr(each, "__index__") for each in listed(value))


def _words(key: str, value: Any, option: str) -> list[str]:
    if isinstance(value, bool):
        return [option if value else option.replace("--", "--no-", 1)]
    texts = setting_texts(value) if key in ("settings", "vary") else _texts(value)
    if key in _REPEATED:
        return [word for text in texts for word in (option, text)]
    return [option, ",".join(texts)]
