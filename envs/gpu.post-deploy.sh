#!/usr/bin/env bash
# Rendered by envs/render.py. Snakemake runs it in the fresh environment, from the working directory.
set -euo pipefail
echo "e507e44d1eda01cf875c74a19d885aaeabe4e3eceed4f88eaaa6bc7918dd98d3  envs/gpu.txt" | sha256sum --check --quiet
env -u MAKEFLAGS make install PYTHON="$CONDA_PREFIX/bin/python" PINS=envs/gpu.txt
