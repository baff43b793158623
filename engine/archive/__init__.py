"""What a training is on disk: checkpoints and plain weights of an engine."""
