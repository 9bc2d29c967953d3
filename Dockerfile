# Two images, with the versions this project is tested with (constraints.txt):
#   docker build --target core -t arborsim .        replay, search, plan, inspect, plot (no torch)
#   docker build --target cuda -t arborsim:cuda .   also record, live and validate, on an NVIDIA GPU
# They are run from the folder that holds the files:
#   docker run --rm -v "$PWD":/data arborsim replay mine.parquet --policy full,h2o --report page.html
#   docker run --rm --gpus all -v "$PWD":/data arborsim:cuda doctor

FROM python:3.11-slim-bookworm AS source
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY arborsim arborsim
COPY backends backends

FROM source AS core
RUN pip install --no-cache-dir --constraint constraints.txt . \
    && useradd --create-home --uid 1000 arborsim
USER 1000
WORKDIR /data
ENTRYPOINT ["arborsim"]
CMD ["--help"]

# PyPI's torch brings the CUDA libraries; the host needs a driver and the NVIDIA Container Toolkit.
# Triton compiles its launchers with gcc.  flash-attn and flashinfer are left out: they are built
# with nvcc, which would triple the image, and torch's own attention stands in for them.
FROM source AS cuda
# Debian keeps no older versions that could be named.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir --constraint constraints.txt ".[torch]" triton \
    && useradd --create-home --uid 1000 arborsim
USER 1000
WORKDIR /data
ENTRYPOINT ["arborsim"]
CMD ["doctor"]
