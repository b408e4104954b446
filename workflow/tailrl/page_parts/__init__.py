"""What all pages share: their look, their charts, and the token explorer."""

from pathlib import Path

TEMPLATES = Path(__file__).parent / "templates"
"""The folder of the templates that pages of several rooms use."""
