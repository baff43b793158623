"""What a config makes of a model on so many ranks, frozen: axes, places, units, and the arithmetic of memory."""
