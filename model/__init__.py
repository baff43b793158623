"""The user's model: what stands on it."""
