"""Errors that end a training step."""


class NonFiniteGradientError(RuntimeError):
    """A gradient has an infinite value or a NaN. Names the parameter, the rank that produced it, and the step."""
