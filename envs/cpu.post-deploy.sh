#!/usr/bin/env bash
# Rendered by envs/render.py. Snakemake runs it in the fresh environment, from the working directory.
set -euo pipefail
echo "34edfaeb51e825b83afae7390771590f9b5942494d1e75696fdd3758077ddcba  envs/cpu.txt" | sha256sum --check --quiet
env -u MAKEFLAGS make install PYTHON="$CONDA_PREFIX/bin/python" PINS=envs/cpu.txt
