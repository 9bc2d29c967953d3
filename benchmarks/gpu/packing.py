"""Traces in one file, which is whole after each: few files are easier to bring home."""

from __future__ import annotations

import zipfile
from pathlib import Path

from arborsim.core.outputs import whole

MOST_BYTES = 15 << 20  #: of the file; what does not fit stays out


def add(packed: Path, name: str, content: bytes) -> bool:
    """Put a compressed trace in, in place of one of that name; whether there was room.

    The file is written anew and then takes the old one's place: at no moment is it cut short.
    """
    held = {}
    if packed.exists():
        with zipfile.ZipFile(packed) as file:
            held = {each: file.read(each) for each in file.namelist()}
    held[name] = content
    if sum(len(each) + 1024 for each in held.values()) > MOST_BYTES:
        return False
    packed.parent.mkdir(parents=True, exist_ok=True)
    with whole(packed) as part, zipfile.ZipFile(part, "w", zipfile.ZIP_STORED) as file:
        for each, data in held.items():
            file.writestr(each, data)
    return True
