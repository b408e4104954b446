#!/usr/bin/env bash
# Rendered by envs/render.py. Snakemake runs it in the fresh environment, from the working directory.
set -euo pipefail
echo "f8205e23f75cc5160a4de4ac36246f887733a1df4dacd93308b3c7948fd56b9b  envs/gpu.txt" | sha256sum --check --quiet
env -u MAKEFLAGS make install PYTHON="$CONDA_PREFIX/bin/python" PINS=envs/gpu.txt
