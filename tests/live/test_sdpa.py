"""One backend of PyTorch's attention, by name, wherever it is called."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional as F  # noqa: E402

from arborsim_torch.kernels.fused import choose_sdpa, pinned, sdpa  # noqa: E402

from .pretended.arming import pretend  # noqa: E402

ROOT = Path(__file__).parents[2]
PUBLIC = "scaled_dot_product_attention"
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real device")


def drawn(*shape: int, dtype: Any = torch.float32, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sources() -> list[Path]:
    return sorted(
        path for where in ("backends", "benchmarks") for path in (ROOT / where).rglob("*.py")
    )


def unpinned(text: str) -> list[int]:
    """Lines that name the public function outside of a context that pins its backend.

    A model of transformers that is told to use it needs `pinned` in the same function or class.
    """
    found: list[int] = []

    def look(node: ast.AST, safe: bool) -> None:
        if isinstance(node, ast.With):
            calls = [item.context_expr for item in node.items]
            names = {ast.unparse(call.func) for call in calls if isinstance(call, ast.Call)}
            safe = safe or bool(names & {"sdpa_kernel", "pinned"})
        if isinstance(node, ast.Module):
            found.extend(part.lineno for part in node.body if _tells(part))
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
        name = node.name if isinstance(node, ast.alias) else name
        if name == PUBLIC and not safe:
            found.append(getattr(node, "lineno", 0))
        for child in ast.iter_child_nodes(node):
            look(child, safe)

    look(ast.parse(text), False)
    return found


def _tells(part: ast.stmt) -> bool:
    """Whether it tells a model to use the public function, and does not pin it."""
    calls = [n for n in ast.walk(part) if isinstance(n, ast.Call)]
    tells = any(
        isinstance(call.func, ast.Attribute) and call.func.attr == "set_attn_implementation"
        and any(isinstance(a, ast.Constant) and a.value == "sdpa" for a in call.args)
        for call in calls
    )  # fmt: skip
    return tells and not any(ast.unparse(call.func) == "pinned" for call in calls)


def test_no_call_of_the_public_function_leaves_the_choice_to_pytorch() -> None:
    found = {str(path.relative_to(ROOT)): unpinned(path.read_text()) for path in sources()}
    assert len(found) > 100
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize("text", [
    "F.scaled_dot_product_attention(q, k, v)",
    "from torch.nn.functional import scaled_dot_product_attention as attend",
    "with other(): torch.nn.functional.scaled_dot_product_attention(q, k, v)",
    "def run(m):\n    m.set_attn_implementation('sdpa')\n    m(1)",
])  # fmt: skip
def test_the_search_finds_what_it_looks_for(text: str) -> None:
    assert unpinned(text)
    assert not unpinned(f"with sdpa_kernel(x):\n    F.{PUBLIC}(q, k, v)")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
def test_the_same_bits_as_the_public_function(dtype: Any, heads: tuple[int, int]) -> None:
    q = drawn(3, heads[0], 5, 32, dtype=dtype)
    k, v = (drawn(3, heads[1], 17, 32, dtype=dtype, seed=i) for i in (1, 2))
    mask = drawn(1, 1, 5, 17) > 0
    options: dict[str, Any] = {"scale": 0.3, "enable_gqa": heads[0] != heads[1]}
    assert torch.equal(sdpa(q, k, v, 0.3), F.scaled_dot_product_attention(q, k, v, **options))
    if heads[0] == heads[1]:
        wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
        assert torch.equal(sdpa(q, k, v, 0.3, mask), wanted)
    own = F.scaled_dot_product_attention(q, k[:, :, :5], v[:, :, :5], is_causal=True, **options)
    assert torch.equal(sdpa(q, k[:, :, :5], v[:, :, :5], 0.3, causal=True), own)


def test_its_choice_is_the_operator_that_runs() -> None:
    q = drawn(1, 2, 1, 32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        sdpa(q, q, q)
    names = {event.key for event in profile.key_averages()}
    assert choose_sdpa(q.device, q.dtype, 32).name == "torch-cpu"
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
    assert f"aten::{PUBLIC}" not in names


def test_it_can_be_compiled_as_one_graph() -> None:
    q, mask = drawn(1, 2, 3, 32), torch.ones(3, 3, dtype=torch.bool).tril()
    compiled = torch.compile(lambda q: sdpa(q, q, q, 0.5, mask), fullgraph=True, backend="eager")
    assert torch.equal(compiled(q), sdpa(q, q, q, 0.5, mask))


CHOICES = [
    (torch.bfloat16, False, "flash attention"),
    (torch.bfloat16, True, "efficient attention"),
    (torch.float32, False, "efficient attention"),
    (torch.float32, True, "efficient attention"),
]


@on_cpu
@pytest.mark.parametrize("n", [1, 15, 16, 33])
@pytest.mark.parametrize(("dtype", "masked", "backend"), CHOICES)
def test_the_backend_on_a_gpu_is_the_one_that_is_named(
    dtype: Any, masked: bool, backend: str, n: int
) -> None:
    q, k, v = (drawn(2, 2, rows, 64, dtype=dtype, seed=rows) for rows in (3, n, n))
    mask = torch.arange(n) <= torch.arange(3)[:, None] + n // 2 if masked else None
    wanted = sdpa(q, k, v, 0.3, mask)
    with pretend() as gpu:
        there = [x if x is None else x.to("cuda") for x in (q, k, v, mask)]
        gpu.launches.clear()
        found = sdpa(there[0], there[1], there[2], 0.3, there[3]).cpu()
        ran = [name for name in gpu.launches if name.endswith("attention")]
        named = choose_sdpa(there[0].device, dtype, 64, masked).name
    assert ran == [backend] == [f"{named.removeprefix('torch-')} attention"]
    assert torch.equal(found, wanted)


@on_cpu
def test_models_that_call_the_public_function_are_kept_from_cudnn() -> None:
    with pretend() as gpu:
        q = drawn(1, 2, 1, 64, dtype=torch.bfloat16).to("cuda")
        F.scaled_dot_product_attention(q, q, q)
        assert gpu.launches["cudnn attention"] == 1  # what recent versions would do
        with pinned(q.device):
            F.scaled_dot_product_attention(q, q, q)
        assert gpu.launches["cudnn attention"] == 1
        assert gpu.launches["flash attention"] == 1
