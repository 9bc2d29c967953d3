"""Compiles the decode kernel for compute capability 9.0, which takes no GPU."""

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from arborsim_torch.kernels import scattered_triton

_POINTERS = {
    "index": "*i32", "mask": "*u8", "part_out": "*fp32", "part_lse": "*fp32", "logits": "*fp32",
}  # fmt: skip
_ALIGNED = (
    "per_split", "q_lane", "q_head", "k_head", "k_slot", "v_head", "v_slot",
    "k_scale_head", "v_scale_head", *_POINTERS, "q", "k", "v", "k_scale", "v_scale",
)  # fmt: skip


def compile_attend(stored: str, rows: int):
    """`_attend` for bfloat16 queries of 128 elements as a call with long paths would have it."""
    scaled = stored != "bf16"
    factors = {"k_scale": "*fp32" if scaled else "*bf16", "v_scale": "*fp32" if scaled else "*bf16"}
    types = {"q": "*bf16", "k": f"*{stored}", "v": f"*{stored}", **factors, **_POINTERS}
    cut = scattered_triton.plan(32_768, rows, 8, 128, 2, 132)
    constants = {
        "GROUP": 4, "DIM": 128, "BLOCK_DIM": 128, "BLOCK_ROWS": cut.block_rows, "BLOCK": cut.block,
        "SCALED": scaled, "FP8": scaled, "MASKED": True, "LOGITS": True, "FACTOR": tl.bfloat16,
        "q_dim": 1, "k_dim": 1, "v_dim": 1, "index_spot": 1, "mask_spot": 1,
        "k_scale_slot": 1, "v_scale_slot": 1,
    }  # fmt: skip
    names = scattered_triton._attend.arg_names
    signature = {name: types.get(name, "i32") for name in names} | {"scale": "fp32"}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        scattered_triton._attend,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in _ALIGNED},
    )
    options = {"num_warps": cut.warps, "num_stages": 3}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
