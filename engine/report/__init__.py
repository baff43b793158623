"""What an engine says of its steps and its memory: logs, monitors, profiles, memory reports."""
