"""Triton kernels: the only folder that imports triton. A file is imported on the first use of its kernel on a GPU."""
