"""Schedules as data, what they must obey, and the simulator that judges them."""
