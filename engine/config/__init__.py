"""The config: one JSON file, checked as a whole before anything is built."""
