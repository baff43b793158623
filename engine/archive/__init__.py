"""A training on disk: checkpoints and plain weights of an engine."""
