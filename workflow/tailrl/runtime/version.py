"""The version, which no job imports: `tailrl.__version__`."""

VERSION = "1.0.0"
