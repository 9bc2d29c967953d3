"""The parts of `benchmarks/validate_gpu.py`."""
