"""How the state of a training lies on disk: tensors in boxes, files, tags, and plain weights."""
