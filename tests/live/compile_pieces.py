"""Compiles the kernels ahead of time, which takes no GPU, and lists what they need.

``python -m tests.live.compile_pieces`` prints a table for compute capabilities 8.0, 9.0 and 10.0,
by the assembler of CUDA that comes with Triton: registers of a thread, bytes that it spills, and
shared memory of a program.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from arborsim_torch.kernels import (
    layers_triton,
    ondemand_triton,
    pieces_kernels,
    pieces_triton,
    rows_triton,
)

from .pieces_cases import PACKED, codec_named

_POINTERS = {
    "index": "*i32", "mask": "*u8", "member": "*i32", "out": "*bf16", "lse": "*fp32",
    "mass": "*fp32", "part_out": "*fp32", "part_lse": "*fp32", "logits": "*fp32", "far": "*fp32",
}  # fmt: skip
_ALIGNED = (
    "per_split", "q_seq", "q_head", "k_head", "k_slot", "v_head", "v_slot",
    "k_scale_head", "v_scale_head", "q", "k", "v", "k_scale", "v_scale",
    *(name for name in _POINTERS if name != "mask"),
)  # fmt: skip
CAPABILITIES = (80, 90, 100)
#: Formats of the table: queries of Llama-3.1-8B in bfloat16.
STORED = ("plain", "fp8", "packed4", "kivi4", "kivi2")
_PROCESSORS = {80: 108, 90: 132, 100: 148}


def compile_attend(stored: str, rows: int, capability: int = 90, dim: int = 128):
    """`attend_split` for bfloat16 queries as a call with long paths has it."""
    form = pieces_triton.storage(codec_named(stored, dim), dim, dim, capability >= 89)
    packed = stored in PACKED
    data = "*bf16" if stored == "plain" else "*u8"
    factors = {"plain": "*bf16", "kivi4": "*i16", "kivi2": "*i16"}.get(stored, "*fp32")
    types = {"q": "*bf16", "k": data, "v": data, "k_scale": factors, "v_scale": "*fp32"}
    processors = _PROCESSORS[capability]
    cut = pieces_triton.launch_shape(32_768, rows, 8, dim, 2, processors, packed)
    constants = {
        "HEADS": 4, "DIM": dim, "BLOCK_DIM": dim, "BLOCK_ROWS": cut.block_rows, "BLOCK": cut.block,
        **form, "INDEXED": True, "MASKED": True, "LOGITS": True, "FACTOR": tl.bfloat16,
        "q_dim": 1, "k_dim": 1, "v_dim": 1, "index_spot": 1, "mask_spot": 1,
        "k_scale_slot": 1, "v_scale_slot": 1, "member_slot": 1,
    }  # fmt: skip
    if packed:
        del constants["k_scale_slot"]
    return _compile(
        pieces_kernels.attend_split, types, constants, capability, packed,
        num_warps=cut.warps, num_stages=3,
    )  # fmt: skip


def compile_merge(capability: int = 90):
    """`merge_splits` of many splits."""
    constants = {"HEADS": 4, "DIM": 128, "BLOCK_DIM": 128, "BLOCK": pieces_triton._MERGED_AT_ONCE,
                 "FAR": True}  # fmt: skip
    return _compile(pieces_kernels.merge_splits, {}, constants, capability, num_warps=4)


def compile_mass(capability: int = 90):
    """`mean_mass` as it is called."""
    constants = {"HEADS": 4, "DIM": 128, "BLOCK": pieces_triton._MASSES_AT_ONCE, "TOGETHER": 4,
                 "FAR": True}  # fmt: skip
    return _compile(pieces_kernels.mean_mass, {}, constants, capability, num_warps=4)


def compile_mean(capability: int = 90):
    """`add_mean_mass` as it is called where pages are read on demand."""
    types = {"position": "*i64", "further": "*i32", "row": "*fp32", "numbers": "*i64"}
    constants = {"HEADS": 4, "DIM": 128, "BLOCK": pieces_triton._MEANS_AT_ONCE, "TOGETHER": 32,
                 "FAR": False, "FURTHER": True}  # fmt: skip
    return _compile(pieces_kernels.add_mean_mass, types, constants, capability, num_warps=4)


def compile_rows(name: str, capability: int = 90):
    """`add_mean_rows` or `sum_group_rows` for a prompt of Llama-3.1-8B in bfloat16."""
    types = {"q": "*bf16", "k": "*bf16", "good": "*u8", "mean": "*fp32", "sums": "*fp64",
             "newest": "*fp32"}  # fmt: skip
    constants = {
        "HEADS": 32 if name == "add_mean_rows" else 4, "MEMBERS": 4, "DIM": 128, "BLOCK_DIM": 128,
        "BLOCK_QUERIES": 64, "BLOCK_KEYS": 64, "FACTOR": tl.bfloat16, "q_dim": 1, "k_dim": 1,
    }  # fmt: skip
    return _compile(getattr(rows_triton, name), types, constants, capability, num_warps=4)


def compile_pages(name: str, capability: int = 90):
    """`rank_pages` for a step of Llama-3.1-8B in bfloat16, or `take_pages` of 2,048 pages."""
    types = {"q": "*bf16", "low": "*bf16", "high": "*bf16", "filled": "*u8", "readable": "*u8",
             "rank": "*i64", "chosen": "*i64"}  # fmt: skip
    constants = {"TOP": 16, "BLOCK": 2048}
    if name == "rank_pages":
        block = ondemand_triton._BLOCK_PAGES
        constants = {"HEADS": 4, "DIM": 128, "BLOCK_DIM": 128, "BLOCK": block, "q_dim": 1}
    return _compile(getattr(ondemand_triton, name), types, constants, capability, num_warps=4)


#: Of a layer of Llama-3.1-8B.
LAYER = {
    "add_norm_rows": {"SIZE": 4096, "BLOCK": 4096, "ADD": True},
    "rotate_rows": {"MEMBERS": 4, "BLOCK_MEMBERS": 4, "HALF": 64, "BLOCK_HALF": 64},
    "silu_product": {"BLOCK": layers_triton._BLOCK},
}


def compile_layer(name: str, capability: int = 90):
    """A kernel of a decode step's layers, in bfloat16."""
    strides = ("key_head", "key_slot", "value_head", "value_slot")
    plain = ("slots", "eps", "first", "count", "slot_head", *strides, *LAYER[name])
    kernel = getattr(layers_triton, name)
    types = {x: "*bf16" for x in kernel.arg_names if x not in plain}
    options = {"num_warps": {"add_norm_rows": 8, "rotate_rows": 2, "silu_product": 4}[name]}
    return _compile(
        kernel, types | {"slots": "*i64"}, LAYER[name], capability, aligned=[*types, *strides],
        enable_fp_fusion=False, **options,
    )  # fmt: skip


def _compile(kernel, types, constants, capability, packed=False, aligned=_ALIGNED, **options):
    names = kernel.arg_names
    types = {**_POINTERS, **types, "scale": "fp32", "eps": "fp32"}
    types |= dict.fromkeys(constants, "constexpr")
    # Records of packed vectors are not multiples of 16 bytes.
    aligned = [n for n in aligned if n in names and not (packed and n in ("k_slot", "v_slot"))]
    source = ASTSource(
        kernel,
        {name: types.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def usage(compiled) -> tuple[int, int, int]:
    """Registers of a thread, bytes that it spills, bytes of shared memory."""
    ptx = compiled.asm["ptx"]
    target = re.search(r"\.target (sm_\w+)", ptx).group(1)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    tool = tools / ("ptxas-blackwell" if target.startswith("sm_10") else "ptxas")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        said = subprocess.run(
            [tool, "-v", f"--gpu-name={target}", source, "-o", Path(folder, "kernel.cubin")],
            check=True, capture_output=True, text=True,
        ).stderr  # fmt: skip
    registers = int(re.search(r"Used (\d+) registers", said).group(1))
    spilled = int(re.search(r"(\d+) bytes spill stores", said).group(1))
    return registers, spilled, compiled.metadata.shared


def main() -> None:
    print("| kernel | " + " | ".join(f"sm_{c}" for c in CAPABILITIES) + " |")
    print("|---|" + "---|" * len(CAPABILITIES))
    kinds = [(f"`attend_split`, {stored}, {rows} rows", compile_attend, (stored, rows))
             for stored in STORED for rows in (4, 64)]  # fmt: skip
    kinds += [("`merge_splits`", compile_merge, ()), ("`mean_mass`", compile_mass, ())]
    kinds += [("`add_mean_mass`", compile_mean, ())]
    kinds += [(f"`{name}`", compile_rows, (name,)) for name in ("add_mean_rows", "sum_group_rows")]
    kinds += [(f"`{name}`", compile_pages, (name,)) for name in ("rank_pages", "take_pages")]
    kinds += [(f"`{name}`", compile_layer, (name,)) for name in LAYER]
    for name, make, arguments in kinds:
        cells = []
        for capability in CAPABILITIES:
            registers, spilled, shared = usage(make(*arguments, capability=capability))
            spills = f", spills {spilled} B" if spilled else ""
            cells.append(f"{registers}{spills}, {shared / 1024:.1f} KiB")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
