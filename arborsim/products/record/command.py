"""`arborsim record`: run searches on a live model and store them as a trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from arborsim.core.outputs import check_writable
from arborsim.products.record.ask import Recording, RecordOptions


def record(options: RecordOptions) -> None:
    """Record with a bar on standard error, then say what was recorded."""
    out = Path(options.out)
    check_writable(out, "--out")
    recording = Recording(replace(options, progress=True))
    try:
        recording.run()
    except KeyboardInterrupt:
        seen = recording.seen
        if not seen.episode:
            said = ": no episode was complete, so nothing was written"
        else:
            kept = f"{seen.episode} whole episodes (of {seen.episodes})"
            said = f": {out} holds {kept}; --resume goes on"
        raise KeyboardInterrupt(said) from None
    print(f"{out}: {recording.seen.episode} episodes, {recording.described()}")
    for usage in recording.seen.models:
        print(usage.sentence)
