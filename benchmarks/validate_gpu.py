"""Everything that needs a GPU, in one run: is it right, how fast is it, what fits.

    PYTHONPATH=.:backends python benchmarks/validate_gpu.py --out reports

1. correctness: decisions, masking, rehydration, kernels and copies against the CPU or a definition;
2. calibration: ``OUT/calibration/DEVICE.toml``, as `arborsim calibrate hardware` measures it;
3. live: Llama-3.1-8B's geometry with random weights under policies, compared with the simulation;
4. context: the longest prompts that fit, with and without attention rows.

Every result is a line of ``OUT/validation/DEVICE/gpu.jsonl`` as soon as it is known.  What the time
does not allow is left out and says so.  ``--toy`` runs the same at toy size, on the CPU in seconds:
that checks this program and nothing else.  Exit code 1: something is not right.
"""

from __future__ import annotations

import os
import sys

if "--toy" in sys.argv:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import importlib.metadata
import json
import platform
import re
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import torch

import arborsim
from arborsim.core.errors import UsageError
from arborsim_torch.models import check_device
from benchmarks.gpu.journal import Facts, Journal
from benchmarks.gpu.parts import PARTS, Parts, Plan
from benchmarks.gpu.summary import print_summary, verdict

#: What a toy run measures instead of Llama-3.1-8B.
TOY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 211,
    "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
#: Prompt tokens; what tells least comes last.
SIZES = (2048, 8192, 32768, 65536, 16384)
TOY_SIZES = (64, 128)
_PACKAGES = ("transformers", "triton", "numpy", "scipy", "pyarrow")


def main() -> int:
    options = _parser().parse_args()
    device = options.device or ("cpu" if options.toy else "cuda")
    try:
        device = check_device(device)
    except UsageError as error:
        print(f"validate_gpu: {error}; --toy runs on the CPU", file=sys.stderr)
        return 2
    name = torch.cuda.get_device_name(device) if device != "cpu" else "cpu"
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    where = options.out / "validation" / slug / "gpu.jsonl"
    journal = Journal(where, options.budget_seconds, torch.device(device), _tell)
    with tempfile.TemporaryDirectory() as folder:
        plan = _plan(options, device, options.out / "calibration" / f"{slug}.toml", Path(folder))
        journal.write("run", "done", _about(plan, name))
        try:
            Parts(plan, journal).run(options.parts)
        finally:
            journal.write("end", "done", {"seconds_left": round(journal.left_s, 1)})
            journal.close()
            print_summary(journal.records)
            print(f"wrote {where}")
    return int(any(verdict(record) in ("NOT OK", "failed") for record in journal.records))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("reports"), help="folder of the results")
    parser.add_argument("--budget-seconds", type=float, default=520.0)
    parser.add_argument("--toy", action="store_true", help="everything small, on the CPU")
    parser.add_argument("--device", default="", help="cuda, cuda:1 or cpu")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--sizes", nargs="+", type=int, help="prompt tokens of the live searches")
    parser.add_argument("--new-tokens", type=int, default=0, help="generated tokens per path")
    parser.add_argument("--model", default="", help="config:NAME (random weights)")
    parser.add_argument("--search-seconds", type=float, default=75.0, help="limit of one search")
    parser.add_argument("--full-calibration", action="store_true", help="not the quick one")
    return parser


def _plan(options: argparse.Namespace, device: str, profile: Path, folder: Path) -> Plan:
    toy = options.toy
    model = options.model or "config:llama-3.1-8b"
    if toy and not options.model:
        path = folder / "toy.json"
        path.write_text(json.dumps(TOY))
        model = f"config:{path}"
    return Plan(
        model=model,
        device=device,
        toy=toy,
        quick=not options.full_calibration,
        sizes=tuple(options.sizes or (TOY_SIZES if toy else SIZES)),
        new_tokens=options.new_tokens or (16 if toy else 64),
        prefill_block=64 if toy else 1024,
        context_step=64 if toy else 1024,
        longest=256 if toy else 1 << 24,
        budget_s=options.budget_seconds,
        search_s=options.search_seconds,
        profile=profile,
        command=" ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    )  # fmt: skip


def _about(plan: Plan, name: str) -> Facts:
    """What the numbers are made with."""
    cuda: Facts = {}
    if plan.device != "cpu":
        properties = torch.cuda.get_device_properties(plan.device)
        cuda = {
            "memory_bytes": properties.total_memory,
            "capability": [properties.major, properties.minor],
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": name,
        **cuda,
        "threads": torch.get_num_threads(),
        "float32_products": torch.get_float32_matmul_precision(),
        "versions": {
            "arborsim": arborsim.__version__,
            "python": platform.python_version(),
            **{package: _version(package) for package in _PACKAGES},
            "torch": torch.__version__,  # with the CUDA that it was built for
        },
        "command": plan.command,
        "budget_s": plan.budget_s,
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _tell(record: Facts) -> None:
    """One line per result while it goes on."""
    known = ("check", "policy", "kind", "for", "grouping", "case", "prompt_tokens", "tokens")
    what = " ".join(str(record[key]) for key in known if key in record)
    seconds = f" {record['seconds']:.1f} s" if "seconds" in record else ""
    print(f"{record['part']}: {what}: {verdict(record)}{seconds}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
