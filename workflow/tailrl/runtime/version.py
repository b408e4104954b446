"""The version, which no job imports: `tailrl.__version__`."""

VERSION = "0.1.0"
