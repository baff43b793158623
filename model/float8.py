"""Let linear layers multiply in float8, by torchao.

Before each product torchao scales its two factors to float8. Parameters, saved activations and results keep their
dtype, so optimizers, messages and checkpoints are as without float8. A layer changes its class in place: names and
hooks stay.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .patches import ModelPatches

MULTIPLE = 16  # of the rows and columns of a float8 product
MIN_CAPABILITY = 8, 9  # of a CUDA device that multiplies in float8


def why_impossible(device: torch.device) -> str:
    """Return why torchao cannot multiply in float8 for this device, or ""."""
    if importlib.util.find_spec("torchao") is None:
        return 'needs the package torchao, which is not installed: pip install "lowtide[fp8]"'
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        return f"needs a GPU of compute capability 8.9 or more, found {found} ({torch.cuda.get_device_name(device)})"
    return ""


def linear_layers(blocks: Iterable[tuple[str, nn.Module]], min_features: int) -> dict[str, nn.Linear]:
    """Return the layers of the blocks that float8 can compute, by name: exactly `nn.Linear`, without a changed forward.

    min_features: the fewest input and output features.
    """
    found = {}
    for name, block in blocks:
        for inner, layer in block.named_modules(prefix=name):
            # Subclasses (adapters) and replaced forwards compute otherwise. torchao's class would ignore that.
            is_plain = type(layer) is nn.Linear and "forward" not in vars(layer)
            if not is_plain:
                continue
            sizes = layer.in_features, layer.out_features
            if min(sizes) >= min_features and all(size % MULTIPLE == 0 for size in sizes):
                found[inner] = layer
    return found


def use_float8(layers: Iterable[nn.Linear], recipe: str, emulates: bool, patches: ModelPatches) -> None:
    """Give the layers torchao's class, until the patches are undone.

    recipe: of torchao, such as "rowwise". emulates: compute the rounded factors in float32, for other devices.
    """
    from torchao.float8 import Float8LinearConfig

    config = Float8LinearConfig.from_recipe_name(recipe)
    # Padding: the number of tokens is a dimension of the product that gives the gradient of the weight.
    config = dataclasses.replace(config, emulate=emulates, pad_inner_dim=True)
    # Two small layers show the attributes that torchao adds. They are the same objects for all layers.
    with torch.device("meta"):
        added = vars(_float8_layer()(MULTIPLE, MULTIPLE, config=config)).items()
        usual = vars(nn.Linear(MULTIPLE, MULTIPLE)).keys()
    for layer in layers:
        for name, value in added:
            if name not in usual:
                patches.override(layer, name, value)
        patches.exchange_class(layer, _float8_layer())


@contextmanager
def without_float8(module: nn.Module) -> Iterator[None]:
    """Let the layers in the module multiply in their dtype, for code that compares runs with different tokens.

    A scale belongs to all tokens of a run, so the same token would get other results.
    """
    layers = [part for part in module.modules() if hasattr(type(part), "multiplies_in_float8")]
    for layer in layers:
        layer.__class__ = nn.Linear
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = _float8_layer()


@functools.cache
def _float8_layer() -> Any:
    from torchao.float8.float8_linear import Float8Linear

    class Float8Layer(Float8Linear):  # type: ignore[misc]
        multiplies_in_float8 = True

        def forward(self, input: Tensor) -> Tensor:
            # A scale follows from the largest element, and an expert may get no tokens.
            out: Tensor = super().forward(input) if input.numel() else nn.Linear.forward(self, input)
            return out

    return Float8Layer
