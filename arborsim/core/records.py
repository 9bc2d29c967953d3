"""Records as JSON: what every result file and log is made of."""

from __future__ import annotations

import math
from typing import Any


def strict(value: Any) -> Any:
    """`value` with NumPy scalars as Python numbers, and what JSON cannot say as None."""
    if isinstance(value, dict):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    if hasattr(value, "tolist"):
        return strict(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
