"""Little more than one parameter is alive at a time."""

import pytest
import torch
from torch import nn

from lowtide.engine.model.deferred import DeferredModel, build_in_files
from tests.engine.drawn_twice import DRAWS, DrawnTwice
from tests.kit import models
from tests.kit.resident import own_bytes


def test_little_more_than_one_parameter_is_alive_at_a_time() -> None:
    def build() -> nn.Module:
        return models.TinyGPT(width=64, layers=6)

    deferred = DeferredModel(build)
    sizes = [value.nbytes for _, value in deferred.values()]
    assert max(sizes) <= deferred.peak_bytes <= 1.5 * max(sizes)
    assert sum(sizes) > 8 * max(sizes)


@pytest.mark.parametrize("draw", DRAWS)
def test_what_a_second_pass_draws_again_is_forgotten_at_once(draw: str) -> None:
    deferred = DeferredModel(lambda: DrawnTwice(draw))
    sizes = [value.nbytes for _, value in deferred.values()]
    alive = 2 if draw == "copy" else 1  # what is copied is alive too
    assert max(sizes) <= deferred.peak_bytes <= (alive + 0.1) * max(sizes)
    assert sum(sizes) > 8 * max(sizes)


def test_a_model_that_is_built_with_memory_has_it_in_files() -> None:
    """Whatever is done to its tensors."""
    counts = []

    def build() -> nn.Module:
        before = own_bytes()
        layers = []
        for _ in range(10):
            layer = nn.Linear(1024, 1024)
            layer.weight.data *= 2
            layers.append(layer.to(torch.float64))
            counts.append(own_bytes() - before)
        return nn.Sequential(*layers)

    model = build_in_files(build)
    largest = max(param.nbytes for param in model.parameters())
    assert max(counts) < 1.5 * largest
    assert sum(param.nbytes for param in model.parameters()) > 9 * largest
