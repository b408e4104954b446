"""The log that comes along, of a real vLLM run, and what there is to know of it: `tailrl demo`."""

import os
import sys
import webbrowser
from pathlib import Path

LOG = Path(__file__).with_name("demo.parquet")
"""Written by `benchmarks/demo_log.py`: `tailrl diagnose` reads it as it reads any log."""

WHAT_IT_IS = """\
The log is of a real run: vLLM 0.32 in bfloat16 sampled 48 responses of SmolLM2-135M-Instruct, and PyTorch scored the
same tokens in float32. One mistake was made on purpose: the engine sampled with top-p 0.9, and the trainer scored the
whole distribution.
"""


def opened(page: Path) -> bool:
    """Whether a browser with windows was started on the page; one in a terminal would hide what was printed there."""
    windows = sys.platform in ("darwin", "win32") or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
    return bool(windows) and webbrowser.open(page.resolve().as_uri())
