"""The search for the largest model that fits: arithmetic that knows no job."""

from __future__ import annotations

from collections.abc import Callable


def most_layers(fits: Callable[[int], bool], start: int, most: int, resolution: float) -> int:
    """Gives the most layers that fit, 0 where not even one does: doubled until too many, then bisected.

    fits: asked for each number once; a model that fits fits with fewer layers too. Where one more layer than those
    given would fit, then less than `resolution` more of them (a share: 0.05). most: the highest number that is tried.
    """
    fitting, layers = 0, min(start, most)
    while fits(layers):
        fitting = layers
        if fitting == most:
            return most
        layers = min(2 * layers, most)
    too_many = layers
    while too_many - fitting > max(1, resolution * fitting):
        layers = (fitting + too_many) // 2
        if fits(layers):
            fitting = layers
        else:
            too_many = layers
    return fitting
