"""The machines of a job: how each is named, what they have, and what runs where."""
