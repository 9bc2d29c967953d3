"""What the steps of a plan should take on a GPU, after its shipped profile.

Nothing here is measured: it is what the plan's minutes are counted with before the GPU is seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from arborsim.machine.cost import CostModel
from arborsim.machine.lookup import load_geometry, load_profile, profile_name

if TYPE_CHECKING:
    from benchmarks.gpu.plan import Arm

#: Triton compiles 19 variants of the kernels in 15 s of a CPU; an arm's first search needs some.
COMPILE_S, VARIANTS_PER_ARM = 0.8, 4
SETUP_S = 0.6  #: of a search
YARDSTICKS_S = 8.0
CHECKS_S, MORE_CHECKS_S = 45.0, 30.0  #: their kernels' compiling included
CALIBRATION_S, TRACE_S, CONTEXT_S = 75.0, 1.0, 30.0

_IMPORT_S = 10.0  # torch and transformers from a cold disk
_AGAIN_S = 5.0  # ... and once more by the process that does the work, with its CUDA context
_ROWS = frozenset({"h2o", "arkv", "arborkv"})  # they read attention of the prompt
#: Measured prompts take longer than the roofline of a datasheet says.
_SLOWER, _SLOWER_WITH_ROWS = 2.0, 3.0
_EAGER_STEP_S = 0.022  # what launching Llama-3.1-8B's kernels one by one takes
_LINK_SHARE = 0.9  # of what large pinned blocks reach


@dataclass(frozen=True)
class Estimate:
    """Seconds on one GPU, for Llama-3.1-8B's geometry.

    Attributes
    ----------
    gpu : str
        Name of a shipped profile.
    """

    gpu: str

    @cached_property
    def cost(self) -> CostModel:
        return CostModel(load_profile(self.gpu), load_geometry("llama-3.1-8b"))

    @property
    def start_s(self) -> float:
        """Imports, and random weights, which are drawn on the device: some ten passes over them."""
        rate = self.cost.profile.hbm_bytes_per_s * self.cost.profile.mbu
        return _IMPORT_S + _AGAIN_S + 10 * self.cost.geometry.weight_bytes / rate

    def search_s(self, arm: Arm | None, prompt: int, graphs: str, new_tokens: int) -> float:
        """A search; `arm` None is transformers alone.  Slower where launches bind a step."""
        cost, share = self.cost, arm.prompt_share if arm else 1.0
        slower = _SLOWER_WITH_ROWS if arm and arm.policy in _ROWS else _SLOWER
        seconds = SETUP_S + slower * cost.prefill_s(prompt)
        kept_bytes = share * prompt * cost.geometry.kv_bytes_per_token
        step_s = 2.0 * float(cost.decode_s(1, prompt, kept_bytes))
        if graphs == "off" or (arm is not None and not arm.graphs):
            step_s = max(step_s, _EAGER_STEP_S)
        if arm is not None and arm.recall != "stage":  # the other half, at every step
            step_s += kept_bytes / (_LINK_SHARE * cost.profile.h2d_bytes_per_s)
        paths = 2.0 if arm is not None and arm.tree else 1.0  # iterations of a tree
        return seconds + paths * new_tokens * step_s


def shipped_profile(device: str, default: str = "h100") -> str:
    """Name of the shipped profile of a GPU that its driver calls `device`."""
    return profile_name(device) or default
