"""``python -m arborsim``, and the command `arborsim`.

Loading the commands takes a second: Ctrl-C meanwhile is answered as it is later.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line (see `arborsim.cli.app.main`)."""
    try:
        from arborsim.cli.app import main as run
    except KeyboardInterrupt:
        print("arborsim: interrupted", file=sys.stderr)
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
