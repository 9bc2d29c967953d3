"""Muon: momentum whose update is orthogonalised, for matrices of hidden layers.

After Jordan et al., "Muon: an optimizer for hidden layers in neural networks"
(2024).  Matrices of equal shape are orthogonalised in one batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

#: Quintic Newton-Schulz coefficients: steep at zero, not exactly convergent.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Return roughly U V^T of each matrix's singular value decomposition U S V^T.

    Parameters
    ----------
    matrices
        Shape (batch, rows, columns).
    steps
        Newton-Schulz iterations; 5 bring singular values to about 0.7-1.2.
    """
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + torch.baddbmm(gram, gram, gram, beta=b, alpha=c) @ x
    result: torch.Tensor = x.mT if tall else x
    return result


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised per matrix.

    Parameters
    ----------
    params
        Matrices (two-dimensional parameters).
    lr
        Spectral norm of an update of a square matrix; taller ones move by
        sqrt(rows / columns) times that.
    momentum
        Decay of the gradient's running sum.
    """

    def __init__(
        self, params: Iterable[torch.nn.Parameter], lr: float = 0.02, momentum: float = 0.95
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    # An optimiser may be given a closure that computes the loss again; nothing here needs that.
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            momentum = group["momentum"]
            by_shape: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape].append(p)
            for (rows, columns), params in by_shape.items():
                updates = []
                for p in params:
                    assert p.grad is not None
                    state = self.state[p]
                    if "momentum" not in state:
                        state["momentum"] = torch.zeros_like(p)
                    buffer = state["momentum"].mul_(momentum).add_(p.grad)
                    updates.append(p.grad.add(buffer, alpha=momentum))
                step = group["lr"] * max(1.0, rows / columns) ** 0.5
                for p, update in zip(params, orthogonalise(torch.stack(updates)), strict=True):
                    p.add_(update, alpha=-step)
