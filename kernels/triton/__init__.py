"""Triton sources: the only folder that imports triton. Each is imported when its kernel is first used on a GPU."""
