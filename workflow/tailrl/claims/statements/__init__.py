"""Every statement of the two papers, and every question that they leave open, with the claims that speak to it.

A statement is decided by the lines of `claims.csv` files whose id is one of `by`, whichever study they are from. One
that is a definition is held by tests; one that no run of this scale can decide says why; one that no run has spoken to
yet names the command that makes one.
"""

from tailrl.claims.statements import dvp, questions, vexact
from tailrl.claims.statements.statement import Statement

__all__ = ["STATEMENTS", "Statement"]

STATEMENTS = [*dvp.STATEMENTS, *vexact.STATEMENTS, *questions.STATEMENTS]
