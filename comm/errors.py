"""What a collective raises when a peer is gone, late, or somewhere else."""


class CollectiveError(RuntimeError):
    """A collective could not complete. Says which rank waited for which rank, in what, and for how long."""
