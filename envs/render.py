"""Write what follows from the pin lists: `python envs/render.py`, after every change of a list.

`cpu.hashes` has the published files' hashes, which uv compares. Every index of these files has the same. A build
that lies elsewhere, PyTorch's for CPUs, has none. The other files are the conda twins.

A conda environment file cannot say `--no-deps` (pip's requirements files know no such option), and Snakemake copies the
file away from here before conda reads it, so that a `-r cpu.txt` in it would point nowhere. Hence two files for a list:
`cpu.yaml` brings Python and what building needs, and `cpu.post-deploy.sh`, which Snakemake runs in the new environment
from the working directory, installs the list as `make venv` does. Snakemake identifies an environment by the bytes of
both files: the digest in the script is what makes a changed list a new environment.

The script's way through Snakemake has been run with a stand-in for conda; conda itself never has been.
"""

import hashlib
import os
import subprocess
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
LISTS = ("cpu", "gpu")

YAML = """\
# Rendered by envs/render.py: the twin of {name}.txt for `snakemake --sdm conda`, together with {name}.post-deploy.sh.
channels:
  - conda-forge
dependencies:
  - python=3.11
  - pip
  - make
  - c-compiler # a few of the pins come as source
"""

# Snakemake may itself run under make, whose flags and variables this make must not inherit.
POST_DEPLOY = """\
#!/usr/bin/env bash
# Rendered by envs/render.py. Snakemake runs it in the fresh environment, from the working directory.
set -euo pipefail
echo "{digest}  envs/{name}.txt" | sha256sum --check --quiet
env -u MAKEFLAGS make install PYTHON="$CONDA_PREFIX/bin/python" PINS=envs/{name}.txt
"""


def render(name: str) -> dict[str, str]:
    """Return the twin files of one pin list, as file name to content."""
    digest = hashlib.sha256((HERE / f"{name}.txt").read_bytes()).hexdigest()
    return {
        f"{name}.yaml": YAML.format(name=name),
        f"{name}.post-deploy.sh": POST_DEPLOY.format(name=name, digest=digest),
    }


def hashes(name: str) -> str:
    """The hashes of a list's files for this kind of machine, by the index that pip is configured with."""
    from install import UV, as_pip

    command = [*UV, "compile", "--quiet", "--no-deps", "--no-emit-index-url", "--format", "pylock.toml"]
    asked = subprocess.run(
        [*command, HERE / f"{name}.txt"], capture_output=True, text=True, check=True, env=as_pip(os.environ)
    )
    lines = [f"# Rendered by envs/render.py: the hashes of the files of {name}.txt."]
    for package in tomllib.loads(asked.stdout)["packages"]:
        # A build with a name of its own ("+cpu") may be another file on another index.
        if "+" not in package["version"]:
            files = package.get("wheels") or [package["sdist"]]
            known = [f"--hash=sha256:{file['hashes']['sha256']}" for file in files]
            lines.append(f"{package['name']}=={package['version']} {' '.join(known)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for name in LISTS:
        for file, content in render(name).items():
            (HERE / file).write_text(content)
        (HERE / f"{name}.hashes").write_text(hashes(name))
