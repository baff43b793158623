"""Predict memory and time of a training, and search for the best config."""
