"""Kernel times that AIConfigurator measured, as tables of `arborsim.machine.kernels`.

PyPI's ``aiconfigurator-core`` (Apache-2.0) holds Parquet tables of GPUs under vLLM, SGLang and
TensorRT-LLM, one folder per version of an engine.  Of each table the version counts that the
package calls current; where it lacks one, the newest before that.  Where several kernels were
measured for one shape, the fastest counts, and of several times of one kernel their median.
Milliseconds become seconds.

What is kept:

- ``product``: at least 128 columns of output, and 256 of input.
- ``decode`` and ``prefill``: attention in bf16 (in fp8 where a type of cache was mostly measured
  with that) with heads of 64, 128 and 256, without a window, and heads of 64 also with one of 128
  tokens.  Up to 8 KV heads: more were measured only of models without shared KV heads, one number
  of heads each, and every one would be another layer of the dense grid.
- ``experts``: gated ones, with tokens routed by a power law (1.2 where it was measured).
- ``latent-*``: with weights in fp8 blocks where they were measured, else bf16.  The header's
  ``latent_covers`` is "module" if the time holds all projections of the attention block, down, up
  and output (in fp8 their bytes halve, and so does that part of the time), and "kernel" if it is
  attention over the latent vectors alone.
- ``all-reduce``: up to 8 GPUs, in one node.  Sizes are bf16 elements: 2^29 of them on 8 H100 take
  4.0 ms, 2 x 7/8 x 1 GiB at 469 GB/s, and on 2 H100 3.2 ms at 334 GB/s, where NVLink carries 450
  GB/s in a direction and the switch adds up on the way if there are 8.

``python -m benchmarks.kernel_tables FOLDER`` makes the tables that are shipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborsim.core.documents import to_toml
from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.outputs import write_text
from arborsim.core.records import from_toml
from arborsim.machine.kernels import TABLES, write_tables
from arborsim.machine.lookup import load_profile

if TYPE_CHECKING:
    import pandas as pd

ENGINES = ("vllm", "sglang", "trtllm")
_NARROW = ("fp8", "fp4")  # types whose peaks a GPU may lack
_Rows = Any  # a pandas.DataFrame


@dataclass(frozen=True)
class _Place:
    """Where a table of ours can lie in the package."""

    folder: str
    file: str
    kind: str  # the column of types
    columns: Mapping[str, str]  # ours, by the package's


@dataclass(frozen=True)
class _Taken:
    """The tables and names that are taken from the package: ``aiconfigurator.toml``."""

    systems: Mapping[str, str]
    types: Mapping[str, str]
    experts: Mapping[str, tuple[int, ...]]
    tables: Mapping[str, tuple[_Place, ...]]


@cache
def selection() -> _Taken:
    """The file of what is taken."""
    file = resources.files("arborsim.machine") / "aiconfigurator.toml"
    return from_toml(_Taken, file.read_text(encoding="utf-8"), "aiconfigurator.toml")


def _products(rows: _Rows) -> _Rows:
    return rows[(rows["n"] >= 128) & (rows["k"] >= 256)]


def _attention(rows: _Rows) -> _Rows:
    if "window_size" not in rows:
        rows = rows.assign(window_size=0)
    plain = rows["window_size"].eq(0) & rows["head_dim"].isin([64, 128, 256])
    short = rows["window_size"].eq(128) & rows["head_dim"].eq(64)
    few = rows["num_key_value_heads"] <= 8
    rows = rows[few & (plain | short)]
    found = rows.groupby(["kv_cache_dtype", "attn_dtype"]).size().unstack(fill_value=0)
    wide = found.index[2 * found["bfloat16"] >= found.max(axis=1)]
    in_bf16 = rows["attn_dtype"].eq("bfloat16")
    return rows[in_bf16 == rows["kv_cache_dtype"].isin(wide)]


def _experts(rows: _Rows) -> _Rows:
    gated = ~rows["kernel_source"].str.contains("nongated")
    found = set(rows["distribution"])
    uneven = "power_law_1.2" if "power_law_1.2" in found else min(found)
    return rows[gated & rows["distribution"].eq(uneven)]


def _latent(rows: _Rows) -> _Rows:
    rows = rows[rows["mla_dtype"].eq("bfloat16")]
    if "gemm_type" not in rows:
        return rows
    weights = "fp8_block" if "fp8_block" in set(rows["gemm_type"]) else "bfloat16"
    return rows[rows["gemm_type"].eq(weights) & rows["model"].eq("deepseek-ai/DeepSeek-V3")]


def _all_reduces(rows: _Rows) -> _Rows:
    eager = rows["kernel_source"].str.endswith("_eager")
    return rows.assign(launch=eager.map({True: "eager", False: "graph"}))[rows["num_gpus"] <= 8]


#: What of each table is kept.
_KEPT: dict[str, Callable[[_Rows], _Rows]] = {
    "product": _products,
    "decode": _attention,
    "prefill": _attention,
    "experts": _experts,
    "latent-decode": _latent,
    "latent-prefill": _latent,
    "all-reduce": _all_reduces,
}


@dataclass(frozen=True)
class Imported:
    """Tables of a GPU under an engine, as they were read."""

    system: str  # the package's name of the GPU
    engine: str
    tables: Mapping[tuple[str, str], pd.DataFrame]  # by table and type
    header: Mapping[str, Any]

    @property
    def gpu(self) -> str:
        """Our name of the GPU, or the package's if we have none."""
        return selection().systems.get(self.system, self.system)

    @property
    def versions(self) -> Mapping[str, str]:
        """The engine's version, by table."""
        found: Mapping[str, str] = self.header["versions"]
        return found


def systems() -> list[str]:
    """The package's names of GPUs."""
    return sorted(path.stem for path in _folder().glob("*.yaml") if "gpu" in _yaml(path))


def engines(system: str) -> list[str]:
    """The engines whose kernels were measured on a GPU."""
    places = _folder().joinpath("data", system).glob("gemm/*/*/gemm_perf.parquet")
    return sorted({path.parent.parent.name for path in places} & {*ENGINES})


def read(gpu: str, engine: str) -> Imported:
    """The tables of a GPU (``b200_sxm``, or ``b200``) under an engine.

    Raises `UsageError`: the package is not installed, knows no such GPU, or has no tables of it
    under that engine.
    """
    system = _system(gpu)
    if engine not in ENGINES:
        raise UnknownName("engine", engine, ENGINES)
    if engine not in (there := engines(system)):
        has = f"but under {' and '.join(there)}" if there else "nor under any other engine"
        raise UsageError(f"aiconfigurator-core has no kernels of {system} under {engine}, {has}")
    tables: dict[tuple[str, str], _Rows] = {}
    versions: dict[str, str] = {}
    covers = set()
    for name, places in selection().tables.items():
        for place in places:
            path = _newest(system, engine, place)
            if path is not None:
                rows = _read(path)
                found = dict(_split(place, name, rows))
                tables |= {(name, kind): each for kind, each in found.items()}
                versions[name] = ", ".join(sorted(set(rows["version"])))
                if name.startswith("latent"):
                    covers.add("module" if "module" in place.file else "kernel")
                break
    source = f"aiconfigurator-core {_version()} (github.com/ai-dynamo/aiconfigurator)"
    gpu = selection().systems.get(system, system)
    header: dict[str, Any] = {"gpu": gpu, "engine": engine, "versions": versions}
    header |= {"source": source, "licence": "Apache-2.0"}
    if covers:
        header["latent_covers"] = " and ".join(sorted(covers))
    return Imported(system, engine, tables, header)


def write_profile(imported: Imported, out: Path) -> Path:
    """Write a hardware profile, and next to it the tables that it names, whose path it returns."""
    tables = out.with_suffix(".parquet")
    write_tables(tables, imported.tables, imported.header)
    write_text(out, to_toml(_profile(imported.system, tables.name)))
    return tables


def _profile(system: str, kernels: str) -> dict[str, Any]:
    """A profile as a table: of a GPU that is shipped what differs, of another one every number."""
    stated = _yaml(_folder() / f"{system}.yaml")
    gpu, node = stated["gpu"], stated["node"]
    link = float(node["pcie_bw"])
    known: dict[str, Any] = {"hbm_bytes": int(gpu["mem_capacity"])}
    known["hbm_bytes_per_s"] = float(gpu["mem_bw"])
    known["flops_per_s"] = float(gpu["bfloat16_tc_flops"])
    known |= {f"{kind}_flops_per_s": float(gpu.get(f"{kind}_tc_flops", 0)) for kind in _NARROW}
    said = f"aiconfigurator-core {_version()}, systems/{system}.yaml"
    if name := selection().systems.get(system):
        base = load_profile(name)
        known = {key: x for key, x in known.items() if abs(x - getattr(base, key)) > 0.01 * x}
        first: dict[str, Any] = {"base": name, "name": name, "kernels": kernels}
        return {**first, **known, "sources": dict.fromkeys(known, said)}
    known["all_reduce_gpus"] = [float(node["num_gpus_per_node"])]
    known["all_reduce_bytes_per_s"] = [float(node["intra_node_bw"])]
    known["all_reduce_latency_s"] = [float(node["p2p_latency"])]
    base = load_profile("h100")
    per_peak = ("eager_bytes_per_s", "dequantise_bytes_per_s")
    links = ("h2d_bytes_per_s", "d2h_bytes_per_s")
    taken = {key: getattr(base, key) for key in base.numbers() if key not in known}
    shares = {key: taken[key] / base.hbm_bytes_per_s for key in per_peak}
    taken |= {key: share * known["hbm_bytes_per_s"] for key, share in shares.items()}
    reached = base.h2d_bytes_per_s / 64e9
    taken |= dict.fromkeys(links, reached * link)
    sources = dict.fromkeys(known, said)
    sources |= dict.fromkeys(taken, "assumed: as on h100")
    for key, share in shares.items():
        sources[key] = f"assumed: {share:.1f} of the peak, as on h100"
    sources |= dict.fromkeys(
        links, f"assumed: {reached:.2f} of {link / 1e9:g} GB/s ({said}), as on h100"
    )
    return {"name": system, "kernels": kernels, **known, **taken, "sources": sources}


def _system(gpu: str) -> str:
    """The package's name of a GPU, which may be given by ours."""
    ours = {name: system for system, name in selection().systems.items()}
    known = systems()
    if (system := ours.get(gpu.lower(), gpu.lower())) in known:
        return system
    raise UnknownName("GPU", gpu, known)


def _newest(system: str, engine: str, place: _Place) -> Path | None:
    """The file of the current version, else of the newest one before it."""
    from packaging.version import Version

    stated = _yaml(_folder() / "query_versions.yaml")
    slots = {**stated["defaults"], **stated.get("overrides", {}).get(system, {})}
    current = Version(slots[engine]["current"])
    folder = _folder().joinpath("data", system, place.folder, engine)
    found = {Version(each.parent.name): each for each in folder.glob(f"*/{place.file}.parquet")}
    fitting = [version for version in found if version <= current]
    return found[max(fitting)] if fitting else None


def _read(path: Path) -> _Rows:
    import pandas as pd

    try:
        return pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None


def _split(place: _Place, name: str, rows: _Rows) -> Iterator[tuple[str, _Rows]]:
    """Rows of a table by type, with our names of the columns."""
    rows, types = _KEPT[name](rows), selection().types
    rows = rows[rows["latency"] > 0]
    keys = list(TABLES[name])
    for kind in (each for each in types if each in set(rows[place.kind])):
        of_kind = rows[rows[place.kind] == kind].rename(columns=place.columns)
        by_kernel = of_kind.groupby([*keys, "kernel_source"], as_index=False)["latency"].median()
        fastest = by_kernel.groupby(keys, as_index=False)["latency"].min()
        yield types[kind], fastest.assign(seconds=fastest.pop("latency") / 1e3)


def _folder() -> Path:
    spec = find_spec("aiconfigurator_core")
    if spec is None or spec.origin is None:
        raise UsageError(
            "this needs the tables of aiconfigurator-core: pip install 'arborsim[kernels]'"
        )
    return Path(spec.origin).parent / "systems"


def _version() -> str:
    from importlib.metadata import version

    return version("aiconfigurator-core")


def _yaml(path: Path) -> dict[str, Any]:
    import yaml

    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found
