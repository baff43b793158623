"""Messages between launcher and agents, and their transport."""
