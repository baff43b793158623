"""One host's side of a job: its agent, the guard above it, and the ranks below."""
