"""Errors that end a run with one line instead of a traceback: the user can act on the line, the stack adds nothing."""


class RunError(RuntimeError):
    """The run cannot go on. The message is one line: what was measured, the limit, and what to do."""


class ReportedElsewhere(Exception):
    """This rank ends after another one that failed first and says why."""
