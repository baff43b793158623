"""The user's model: its repeated blocks, and everything that the engine installs on it."""
