#!/usr/bin/env bash
# Rendered by envs/render.py. Snakemake runs it in the fresh environment, from the working directory.
set -euo pipefail
echo "972c85d54a072b9e9180695cd80e17f74ebd0aecbe03084239fc1226cf733441  envs/cpu.txt" | sha256sum --check --quiet
env -u MAKEFLAGS make install PYTHON="$CONDA_PREFIX/bin/python" PINS=envs/cpu.txt
