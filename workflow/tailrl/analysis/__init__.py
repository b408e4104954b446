"""Numbers from artifacts: scores, curves, survival, early warnings. No verdicts, no pages."""
