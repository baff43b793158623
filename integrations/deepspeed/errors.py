"""What is raised where DeepSpeed asserts."""

from ..engine.config.errors import ConfigError


class UsageError(ValueError, AssertionError):
    """A call that DeepSpeed answers with an AssertionError, by which scripts may know it; here it says what to do."""


DeepSpeedConfigError = ConfigError
"""The name by which scripts catch errors of a config."""
