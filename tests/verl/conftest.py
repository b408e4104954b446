"""verl on a CPU, with the plugin by its own entry point."""

import os
import sys
from pathlib import Path

os.environ["VERL_PLATFORM"] = "cpu"
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
sys.path.insert(0, str(Path(__file__).parent))  # workers of Ray import what they are sent

import cpu_platform  # noqa: E402,F401 before verl asks for a platform
