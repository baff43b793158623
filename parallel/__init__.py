"""Splits of layers, sequences and experts over an axis of the mesh."""
