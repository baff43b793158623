"""Training state on disk: chunks of tensors, files, tags, and plain weights."""
