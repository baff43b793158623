"""Measure the machine: operations, messages, files and engines."""
