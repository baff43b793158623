"""The launcher's side of a job: attempts, what is prepared, seen, and said of a failure."""
