"""Start and watch the ranks of a job. Uses the standard library and psutil, and imports no torch."""
