"""Numbers from artifacts: scores, curves, survival. No verdicts, no pages."""
