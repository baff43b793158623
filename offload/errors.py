"""What goes wrong with offload."""


class OffloadError(RuntimeError):
    """Bytes could not be kept or moved. Says where (file, rank, key or pool), what was expected, and what was found."""
