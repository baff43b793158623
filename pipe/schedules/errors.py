"""What goes wrong with a schedule."""


class ScheduleError(ValueError):
    """A schedule that cannot be made, read or run.

    Says where (line and column of a text, or rank, action and place in the rank's list), what was expected, what was
    found and what to do; what is wrong with a list of actions is shown in it, with the failing cell marked `>2F0<`.
    """
