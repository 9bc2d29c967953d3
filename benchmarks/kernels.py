"""How well kernels that were not measured follow from those that were.

``python benchmarks/kernels.py [--out reports/benchmarks/kernels.json]`` takes about a minute.

Of every shipped table one shape at a time is left out and interpolated from the rest.

- Products: the sum over the four products of a layer (queries, keys and values; output; gate and
  up; down) of models whose shapes were all measured.  ``shape`` leaves out a shape, so that its
  neighbours of the same output width give it; ``width`` all shapes of that output width, as for a
  model whose widths are not on the grid.  ``decode`` is up to 512 tokens, ``prefill`` more.
- Attention: each number of query heads between others, at the same KV heads.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import numpy as np

from arborsim.machine.grid import Bound, Grid, Peak
from arborsim.machine.kernels import KernelTables, shipped_tables
from arborsim.machine.lookup import load_profile

#: Output and input width of a layer's products on one of the GPUs that share it.
LAYERS = {
    "Qwen3-0.6B": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
    "Qwen3-1.7B": ((4096, 2048), (2048, 2048), (12288, 2048), (2048, 6144)),
    "Llama-3.2-1B": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
    "Llama-3.2-3B": ((5120, 3072), (3072, 3072), (16384, 3072), (3072, 8192)),
    "Gemma-3-4B on 2": ((2048, 2560), (2560, 1024), (10240, 2560), (2560, 5120)),
    "Qwen3-8B on 2": ((3072, 4096), (4096, 2048), (12288, 4096), (4096, 6144)),
    "Qwen3-8B on 4": ((1536, 4096), (4096, 1024), (6144, 4096), (4096, 3072)),
    "Qwen3-8B on 8": ((768, 4096), (4096, 512), (3072, 4096), (4096, 1536)),
    "Llama-3.1-8B on 4": ((1536, 4096), (4096, 1024), (7168, 4096), (4096, 3584)),
    "Mistral-Small-24B on 4": ((1536, 5120), (5120, 1024), (16384, 5120), (5120, 8192)),
    "Mistral-Small-24B on 8": ((768, 5120), (5120, 512), (8192, 5120), (5120, 4096)),
}
WIDTHS = {"bf16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "nvfp4": 0.56, "int4": 0.53}
MOST_DECODED = 512


def dense(tables: KernelTables, table: str, kind: str) -> tuple[list[np.ndarray], np.ndarray]:
    """The axes of a table, and its seconds on their grid, NaN where nothing was measured."""
    *keys, seconds = tables.columns(table, kind)
    axes, index = zip(*(np.unique(key, return_inverse=True) for key in keys), strict=True)
    values = np.full([len(axis) for axis in axes], np.nan)
    values[tuple(index)] = seconds
    return list(axes), values


def left_out(axes: list[np.ndarray], values: np.ndarray, bound: Bound, along: int) -> np.ndarray:
    """What the others give for each slice along an axis; NaN for the first and last one."""
    found = np.full(values.shape, np.nan)
    for at in range(1, len(axes[along]) - 1):
        others = [np.delete(axis, at) if n == along else axis for n, axis in enumerate(axes)]
        grid = Grid(others, np.delete(values, at, along), bound)
        points = [axis[at : at + 1] if n == along else axis for n, axis in enumerate(axes)]
        place = (slice(None),) * along + (slice(at, at + 1),)
        found[place] = grid.seconds(*np.meshgrid(*points, indexing="ij"))
    return found


def shares(errors: Any) -> dict[str, float]:
    """Median and 90th percentile of absolute errors, as shares."""
    known = np.abs(errors)[np.isfinite(errors)]
    return {"median": round(float(np.median(known)), 4),
            "p90": round(float(np.quantile(known, 0.9)), 4)}  # fmt: skip


def product_errors(tables: KernelTables, kind: str, peak: Peak) -> dict[str, Any]:
    """Errors of a layer's products, by what was left out and whether it decodes.

    ``cached`` is the share of single products that took less than reading the weights does.
    """
    axes, measured = dense(tables, "product", kind)
    out, inner, tokens = axes

    def bound(out: Any, inner: Any, tokens: Any) -> Any:
        return peak.product_s(tokens, out, inner, WIDTHS[kind])

    few = measured[..., tokens <= 64]
    read_s = out[:, None, None] * inner[:, None] * WIDTHS[kind] / peak.bytes_per_s
    found: dict[str, Any] = {"cached": round(float((few < read_s)[np.isfinite(few)].mean()), 4)}
    for name, along in (("shape", 1), ("width", 0)):
        predicted = left_out(axes, measured, bound, along)
        errors = []
        for layer in LAYERS.values():
            if not all(n in out and k in inner for n, k in layer):
                continue
            at = [(np.searchsorted(out, n), np.searchsorted(inner, k)) for n, k in layer]
            errors.append(sum(predicted[i] for i in at) / sum(measured[i] for i in at) - 1)
        each = np.array(errors)
        found[name] = {
            "decode": shares(each[:, tokens <= MOST_DECODED]),
            "prefill": shares(each[:, tokens > MOST_DECODED]),
        }
    return found


def attention_errors(tables: KernelTables, table: str, kind: str, peak: Peak) -> dict[str, float]:
    """Errors of attention without a window whose number of heads was left out."""
    *keys, seconds = tables.columns(table, kind)
    window, head_dim, kv_heads = keys[:3]
    errors = []
    for size, shared in sorted(set(zip(head_dim.tolist(), kv_heads.tolist(), strict=True))):
        of_these = (window == 0) & (head_dim == size) & (kv_heads == shared)
        axes, index = zip(
            *(np.unique(key[of_these], return_inverse=True) for key in keys[3:]), strict=True
        )
        measured = np.full([len(axis) for axis in axes], np.nan)
        measured[tuple(index)] = seconds[of_these]

        def bound(heads: Any, n: Any, tokens: Any, size: int = size, shared: int = shared) -> Any:
            pairs = n * tokens * (1 if table == "decode" else tokens / 2)
            read = n * tokens * size * (shared if table == "decode" else shared + heads)
            return peak.attention_s(pairs, 4 * read, heads, size)

        errors.append((left_out(list(axes), measured, bound, 0) / measured - 1).ravel())
    return shares(np.concatenate(errors))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    for (gpu, engine), path in sorted(shipped_tables().items()):
        tables, profile = KernelTables(path), load_profile(gpu)
        peak = Peak(profile.flops_per_s, profile.hbm_bytes_per_s)
        found: dict[str, Any] = {
            "product": {
                kind: product_errors(tables, kind, peak) for kind in tables.types("product")
            }
        }
        for table in ("decode", "prefill"):
            found[table] = {
                kind: attention_errors(tables, table, kind, peak) for kind in tables.types(table)
            }
        figures[f"{gpu} {engine}"] = found
        print(f"{gpu} {engine}: {json.dumps(found)}", file=sys.stderr)
    text = json.dumps({"layers": sorted(LAYERS), "errors": figures}, indent=2)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
