"""A host's side of a job: the agent, its guard, and the ranks."""
