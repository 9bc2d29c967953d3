"""What a folder with a model has to hold before it is loaded."""

from __future__ import annotations

from pathlib import Path

from arborsim.core.errors import UsageError
from arborsim_torch.models import ROOM, free_bytes

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.pkl")


def check_files(option: str, folder: str, needed: tuple[str, ...], what: str) -> Path:
    """The folder, if it holds the `needed` files and its weights as safetensors.

    Raises
    ------
    UsageError
        One line that says what is missing.
    """
    path = Path(folder)
    if not path.exists():
        raise UsageError(f"{option}: no such folder")
    if not path.is_dir():
        raise UsageError(f"{option}: expected a folder with {what}, but that is a file")
    for file in needed:
        if not (path / file).is_file():
            raise UsageError(f"{option}: not {what}: it has no {file}")
    if not any(path.rglob("*.safetensors")):
        pickled = any(next(path.rglob(pattern), None) for pattern in _PICKLED)
        raise UsageError(
            f"{option}: it has no *.safetensors"
            + (": pickled weights can run code and are not loaded: convert them" if pickled else "")
        )
    return path


def check_room(option: str, path: Path, device: str) -> None:
    """Refuse weights that the device has no memory for, before they are read.

    Raises
    ------
    UsageError
    """
    needed = sum(file.stat().st_size for file in path.rglob("*.safetensors"))
    free = free_bytes(device)
    if free is not None and needed > ROOM * free:
        raise UsageError(
            f"{option}: its weights take {needed / 1e9:.1f} GB, but {free / 1e9:.1f} GB are free "
            f"on {device}: use a smaller model or another device"
        )
