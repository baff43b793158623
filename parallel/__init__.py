"""How one model is shared: layers, sequences and experts over an axis of the mesh, and tokens over tiles."""
