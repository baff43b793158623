"""Splits a model over ranks: layers, sequences and experts over a mesh axis, and tokens into tiles."""
