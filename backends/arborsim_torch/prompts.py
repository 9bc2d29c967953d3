"""Files of prompts: JSON lines, checked before PyTorch is imported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arborsim.core.errors import UsageError

#: A line holds this.
PROMPT = '{"prompt": "..."}'
FOLLOWED = '{"prompt": "...", "tokens": "..."}'  #: by what followed it, if that is known


def read_text(path: Path, what: str = "text") -> str:
    """A file of UTF-8 text, which is not empty; a `UsageError` names the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file of {what}") from None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{path}: cannot be read as UTF-8 text ({why})") from error
    if what == "text" and not text.strip():
        raise UsageError(f"{path}: the text is empty")
    return text


def read_lines(path: Path, expected: str) -> list[tuple[int, Mapping[str, Any]]]:
    """The objects of a JSON-lines file with their line numbers; empty lines are skipped.

    Raises `UsageError`, which names file and line that are wrong.  `expected` belongs there.
    """
    found = []
    for number, line in enumerate(read_text(path, "prompts").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as problem:
            why = getattr(problem, "msg", str(problem))
            raise UsageError(f"{path}, line {number}: not JSON ({why})") from problem
        if not isinstance(entry, Mapping):
            raise UsageError(f"{path}, line {number}: expected {expected}")
        found.append((number, entry))
    if not found:
        raise UsageError(f"{path}: no prompts; write one {expected} per line")
    return found


def read_prompts(path: Path) -> list[str]:
    """The "prompt" of every line of a JSON-lines file; raises as `read_lines` does."""
    prompts = []
    for number, entry in read_lines(path, PROMPT):
        prompt = entry.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise UsageError(f"{path}, line {number}: expected {PROMPT}")
        prompts.append(prompt)
    return prompts
