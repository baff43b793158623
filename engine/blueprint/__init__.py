"""Decides the layout of a training from config, model and number of ranks: axes, places, units and bytes."""
