"""The tests of `tailrl.trl` with several versions of TRL: docs/results/trl_versions.csv.

    python benchmarks/trl_versions.py --out docs/results/trl_versions.csv [VERSION ...]

Each version is put into a folder of its own below `.older/`, without its dependencies: those of the environment serve.
A row has how many tests passed and were skipped, and which failed. A version that `tailrl.trl` refuses to import has
that sentence.
"""

import argparse
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from table import show

ROOT = Path(__file__).parents[1]
VERSIONS = ("1.13.0", "1.14.2", "1.15.0", "1.16.0")
TESTS = "tests/unit/integrations/trl"


def folder_of(wanted: str) -> Path:
    """The folder of a version, downloaded if it is not there yet."""
    folder = ROOT / ".older" / f"trl-{wanted}"
    if not folder.is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
        subprocess.run([*command, "--target", str(folder), f"trl=={wanted}"], check=True)
    return folder


def row_of(wanted: str) -> dict[str, object]:
    """Runs the tests with a version of TRL."""
    row: dict[str, object] = {"trl": wanted}
    row |= {name: version(name) for name in ("transformers", "accelerate", "deepspeed", "peft", "torch")}
    path = os.pathsep.join([str(folder_of(wanted)), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def ran(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )

    imported = ran("-c", "import tailrl.trl, trl; print(trl.__version__)")
    if imported.returncode:
        return row | {"passed": 0, "skipped": 0, "failed": "", "refused": imported.stderr.strip().splitlines()[-1]}
    if imported.stdout.strip() != wanted:
        raise SystemExit(f"TRL {imported.stdout.strip()} was imported, not {wanted}")
    ended = ran("-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", "-m", "not vllm", TESTS)
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|skipped)", ended.stdout)}
    if "passed" not in counts:
        raise SystemExit(f"no test ran with TRL {wanted}:\n{ended.stdout[-2000:]}")
    failed = sorted(set(re.findall(r"^(?:FAILED|ERROR) \S+::(\S+)", ended.stdout, re.MULTILINE)))
    return row | {"passed": 0, "skipped": 0} | counts | {"failed": "; ".join(failed), "refused": ""}


def main() -> None:
    """Runs the tests with each version, shows the table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=VERSIONS, metavar="VERSION")
    parser.add_argument("--out", type=Path, help="the CSV file")
    options = parser.parse_args()
    show([row_of(wanted) for wanted in options.versions], options.out)


if __name__ == "__main__":
    main()
