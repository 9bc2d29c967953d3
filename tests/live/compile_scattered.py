"""Compiles the decode kernels for compute capability 9.0, which takes no GPU."""

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from arborsim_torch.kernels import scattered_kernels, scattered_triton

_POINTERS = {
    "index": "*i32", "mask": "*u8", "out": "*bf16", "lse": "*fp32", "mass": "*fp32",
    "part_out": "*fp32", "part_lse": "*fp32", "logits": "*fp32",
}  # fmt: skip
_ALIGNED = (
    "per_split", "q_lane", "q_head", "k_head", "k_slot", "v_head", "v_slot",
    "k_scale_head", "v_scale_head", *_POINTERS, "q", "k", "v", "k_scale", "v_scale",
)  # fmt: skip


def compile_attend(stored: str, rows: int):
    """`attend_split` for bfloat16 queries of 128 elements as a call with long paths has it."""
    scaled = stored != "bf16"
    factors = "*fp32" if scaled else "*bf16"
    types = {
        "q": "*bf16", "k": f"*{stored}", "v": f"*{stored}", "k_scale": factors, "v_scale": factors,
    }  # fmt: skip
    cut = scattered_triton.launch_shape(32_768, rows, 8, 128, 2, 132)
    constants = {
        "GROUP": 4, "DIM": 128, "BLOCK_DIM": 128, "BLOCK_ROWS": cut.block_rows, "BLOCK": cut.block,
        "SCALED": scaled, "FP8": scaled, "MASKED": True, "LOGITS": True, "FACTOR": tl.bfloat16,
        "q_dim": 1, "k_dim": 1, "v_dim": 1, "index_spot": 1, "mask_spot": 1,
        "k_scale_slot": 1, "v_scale_slot": 1,
    }  # fmt: skip
    return _compile(
        scattered_kernels.attend_split, types, constants, num_warps=cut.warps, num_stages=3
    )


def compile_merge():
    """`merge_splits` of as many splits as there can be."""
    constants = {"GROUP": 4, "DIM": 128, "BLOCK_DIM": 128, "BLOCK": scattered_triton._MOST_SPLITS}
    return _compile(scattered_kernels.merge_splits, {}, constants, num_warps=4)


def compile_mass():
    """`mean_mass` as it is called."""
    return _compile(scattered_kernels.mean_mass, {}, {"GROUP": 4, "BLOCK": 1024}, num_warps=4)


def _compile(kernel, types, constants, **options):
    names = kernel.arg_names
    types = {**_POINTERS, **types, "scale": "fp32", **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(
        kernel,
        {name: types.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in _ALIGNED if name in names},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
