#!/bin/sh
# Validate arborsim on this machine's GPU, without a package registry, the network or git:
#   ./run.sh --out DIR [--parts ...] [--budget-seconds N] [--resume FILE] [--device cpu --tiny]
# Needs Python 3.11 or newer (PYTHON=... says which) with torch and transformers, and CUDA.
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
refuse() {
    echo "run.sh: $1" >&2
    exit 2
}
for file in bundle.json benchmarks/validate_gpu.py benchmarks/gpu/needs.py; do
    [ -f "$here/$file" ] || refuse "the bundle lacks $file: unpack it again"
done
command -v "$python" >/dev/null || refuse "there is no $python: PYTHON=... says where Python is"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    refuse "$python is not Python 3.11 or newer: PYTHON=... says where that is"
exec "$python" "$here/benchmarks/validate_gpu.py" "$@"
