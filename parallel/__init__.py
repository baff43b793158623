"""Splits of layers, sequences and experts over an axis of the mesh, and of sequences into tiles."""
