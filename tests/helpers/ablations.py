"""The ablations of ArborKV's paper."""

from __future__ import annotations

from typing import Any

ABLATIONS: dict[str, dict[str, Any]] = {
    "no v": {"use_value": False},
    "no u": {"use_certainty": False},
    "no a": {"use_attention": False},
    "no sibling coordination": {"eta": 1.0},
    "TAE only": {"msve": False},
    "MSVE only": {"lambda_distance": 0.0},
    "no rehydration": {"rehydrate": False},
    "tail only": {"retain": "tail", "pin_prompt": False},
    "sinks + tail": {"retain": "sinks+tail", "pin_prompt": False},
    "sinks + tail + heavy hitters": {"pin_prompt": False},
}
"""The rows of the paper's Tables 3, 4 and 7 as settings."""
