"""What goes wrong with checkpoints."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or read. Says which file, and what is left intact."""


class NoCheckpointError(CheckpointError):
    """There is no checkpoint where one was looked for."""
