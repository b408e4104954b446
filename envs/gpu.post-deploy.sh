#!/usr/bin/env bash
# Rendered by envs/render.py. Snakemake runs it in the fresh environment, from the working directory.
set -euo pipefail
echo "5296aaf6dd3d9940ba106b7375b129a52be736fecd28e1d4b04c622c27603fc4  envs/gpu.txt" | sha256sum --check --quiet
env -u MAKEFLAGS make install PYTHON="$CONDA_PREFIX/bin/python" PINS=envs/gpu.txt
