#!/usr/bin/env bash
# Rendered by envs/render.py. Snakemake runs it in the fresh environment, from the working directory.
set -euo pipefail
echo "6512179a98894e6e472e182d5cba17a0e0c97b331109e826b8ebfcc2c2ab2b26  envs/gpu.txt" | sha256sum --check --quiet
env -u MAKEFLAGS make install PYTHON="$CONDA_PREFIX/bin/python" PINS=envs/gpu.txt
