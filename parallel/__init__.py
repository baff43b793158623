"""How the work of one model is divided: over ranks, and over tiles of a sequence one after the other."""
