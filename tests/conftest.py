"""Settings for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from arborsim.report import progress

#: Files that take longest, in seconds of CPU.  Workers take whole files, and these first, so that
#: none is left with a long one when the others have ended.
LONGEST = (
    "policies/test_against_oracles.py",
    "test_doc_commands.py",
    "test_tutorials.py",
    "fuzz/test_kills.py",
    "live/test_live_policies.py",
    "live/pretended/test_memory.py",
    "live/pretended/test_runs.py",
    "show/test_site.py",
    "live/test_pieces.py",
    "live/test_gpu_bundle.py",
    "live/test_validate_gpu.py",
    "live/test_kernels_pieces.py",
    "live/test_shadow.py",
    "fuzz/test_fuzz.py",
    "plan/test_plan.py",
    "cli/test_plan.py",
    "cli/test_plan_report.py",
    "calibrate/test_hardware.py",
    "live/test_record.py",
    "sweep/test_ray.py",
    "sweep/test_sweep.py",
    "validate/test_published.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {Path(__file__).parent / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))  # stable


# Machines are shared and slow at times: how long an example takes says nothing about the code.
settings.register_profile("arborsim", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("arborsim")
# Errors are one line, also where loading a model takes long enough for a line of progress.
progress.LINE_S = 3600.0
