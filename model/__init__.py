"""The user's model: where its blocks are, and what stands on it."""
