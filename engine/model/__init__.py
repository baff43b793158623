"""The model as the caller gave it, and what is put on it before there are ranks: construction, fusing, tiles."""
