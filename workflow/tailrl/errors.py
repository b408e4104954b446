"""The one exception that a user is meant to read: a sentence that names what is wrong and where."""


class StudyError(Exception):
    """Bad input or an impossible request; the command line prints it without a traceback and exits 1."""


class NumericalError(StudyError):
    """A NaN or Inf in log-probs, loss or gradient: the update is skipped, and the run goes on for a while."""
