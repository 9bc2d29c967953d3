"""Problems for the Triton kernels, which this module solves in Triton's interpreter.

The interpreter is chosen when Triton is imported, so that takes a process of its own:
``TRITON_INTERPRET=1 python -m tests.live.scattered_cases FILE`` writes the results.
"""

import sys
from dataclasses import dataclass

import torch

from .oracle_attention import numbers

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """Attention of one query per sequence over `n` of `capacity` slots."""

    dtype: torch.dtype = torch.float32
    stored: torch.dtype | None = None
    dim: int = 64
    kv_heads: int = 2
    group: int = 4
    seqs: int = 2
    n: int = 77
    capacity: int = 300
    index: str = "flat"  # or "by head"
    mask: str = "none"  # or "sequences", "heads"
    padding: int = 0  # among the n
    strided: bool = False

    @property
    def name(self) -> str:
        parts = {"dtype": self.dtype, "stored": self.stored}
        kind = "-".join(str(part).removeprefix("torch.") for part in parts.values() if part)
        sizes = f"{self.seqs}x{self.kv_heads}x{self.group}x{self.dim}-n{self.n}-pad{self.padding}"
        strided = "-strided" if self.strided else ""
        return f"{kind}-{sizes}-{self.index.replace(' ', '-')}-{self.mask}{strided}"

    def build(self) -> tuple[tuple, dict]:
        """Arguments of `attend_scattered`."""
        seed = self.n + self.dim + self.group
        heads = self.kv_heads * self.group
        q = numbers(seed, self.seqs, heads, self.dim, dtype=self.dtype)
        shape = (2, self.kv_heads, self.capacity, self.dim)
        if self.strided:  # keys and values interleaved, slots before heads
            shape = (self.capacity, self.kv_heads, 2, self.dim)
        pool, scales = numbers(seed + 1, *shape), {}
        if self.stored:
            pool = (pool * 30).to(self.stored)
            made = numbers(seed + 2, 2, self.kv_heads, self.capacity).abs() / 30
            scales = {"k_scale": made[0], "v_scale": made[1]}
        else:
            pool = pool.to(self.dtype)
        k, v = pool.permute(2, 1, 0, 3) if self.strided else pool
        q = q.transpose(0, 1).contiguous().transpose(0, 1) if self.strided else q
        mask = None
        if self.mask != "none":
            heads_of_mask = (self.kv_heads,) if self.mask == "heads" else ()
            mask = numbers(seed + 3, self.seqs, *heads_of_mask, self.n) < 0.3
            mask[-1] = False  # a sequence that reads nothing
        return (q, k, v, self._slots(seed), self.dim**-0.5, mask), scales

    def _slots(self, seed: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(seed)
        rows = [
            torch.randperm(self.capacity, generator=random)[: self.n] for _ in range(self.kv_heads)
        ]
        index = torch.stack(rows).to(torch.int32)
        if self.padding:
            index[:, torch.randperm(self.n, generator=random)[: self.padding]] = -1
        return index if self.index == "by head" else index[0]


CASES = (
    *(
        Case(dtype=dtype, dim=dim, group=group, n=n)
        for dtype in (torch.float16, torch.bfloat16, torch.float32)
        for dim, group, n in ((64, 1, 77), (128, 4, 131), (64, 7, 200))
    ),
    *(
        Case(dtype=dtype, stored=stored, dim=dim, mask="sequences", padding=5)
        for dtype, dim in ((torch.float16, 128), (torch.bfloat16, 64), (torch.float32, 64))
        for stored in (FP8, torch.int8)
    ),
    Case(index="by head", mask="heads", padding=9, seqs=3),
    Case(mask="sequences", strided=True, seqs=3),
    Case(stored=FP8, strided=True, padding=3, index="by head"),
    Case(n=1),
    Case(n=64, kv_heads=1, group=1, seqs=1),
    Case(n=12, padding=12),
    Case(n=0),
    Case(dim=80, n=33),
    Case(seqs=9, group=3, n=70, mask="sequences"),  # more rows than one program takes
    Case(dtype=torch.bfloat16, seqs=12, group=7, n=150, mask="sequences", dim=128),
)


def main(path: str) -> None:
    """Solve all cases and write what came out, with and without the mass."""
    from arborsim_torch.kernels.scattered_triton import attend_scattered_triton

    found = {}
    for case in CASES:
        arguments, scales = case.build()
        found[case.name] = attend_scattered_triton(*arguments, **scales)
        bare = attend_scattered_triton(*arguments, **scales, want_mass=False)
        assert bare[2] is None
        assert all(torch.equal(a, b) for a, b in zip(bare[:2], found[case.name][:2], strict=True))
    torch.save(found, path)


if __name__ == "__main__":
    main(sys.argv[1])
