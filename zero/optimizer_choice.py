"""Which rule updates: by name, or as a torch optimizer of the caller's does; and whether that can run on shards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..kernels.optimizer_step import RULES, UpdateRule
from .layout import BLOCK_NUMEL

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def rule_named(name: str, options: Mapping[str, Any]) -> UpdateRule:
    """The fused rule of that name; SGD without momentum keeps no state."""
    rule = RULES[name]
    if name == "sgd" and not options["momentum"]:
        return UpdateRule("sgd", (), rule.apply)
    return rule


_TORCH_TWINS = {
    torch.optim.AdamW: "adamw",
    torch.optim.Adam: "adam",
    torch.optim.SGD: "sgd",
    torch.optim.Adagrad: "adagrad",
}


def rule_like(optimizer: torch.optim.Optimizer) -> UpdateRule | None:
    """The fused rule that does what this torch optimizer does, where there is one for all its options."""
    name = _TORCH_TWINS.get(_class_that_updates(type(optimizer)))
    if name is None:
        return None
    for options in optimizer.param_groups:
        if (
            options.get("amsgrad")
            or options.get("maximize")
            or options.get("capturable")
            or options.get("differentiable")
        ):
            return None
        if name == "adam" and options.get("decoupled_weight_decay"):
            return None
        if not all(isinstance(value, (int, float, bool, tuple, list, type(None))) for value in options.values()):
            return None
    momenta = {bool(options.get("momentum")) for options in optimizer.param_groups}
    if len(momenta) > 1:
        return None
    return rule_named(name, optimizer.param_groups[0])


def _class_that_updates(cls: type) -> type:
    """The class itself, or the one that it derives from with nothing but an `__init__` of its own."""
    while cls not in _TORCH_TWINS and not any(_is_changed(cls, name) for name in vars(cls)):
        cls = cls.__mro__[1]
    return cls


def _is_changed(cls: type, name: str) -> bool:
    if name == "step":  # torch wraps it anew for each class
        return inspect.unwrap(vars(cls)[name]) is not inspect.unwrap(getattr(cls.__mro__[1], name))
    return not (name.startswith("__") and name.endswith("__"))


class _NotMadeAgainError(ValueError):
    """A class cannot be called with other parameters."""


def another(template: torch.optim.Optimizer, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer of the same class and options over other parameters. Raises ValueError where its class refuses."""
    options = {key: value for key, value in template.param_groups[0].items() if key != "params"}
    taken = inspect.signature(type(template)).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values())
    given = {key: value for key, value in template.defaults.items() if key != "params" and (takes_all or key in taken)}
    try:
        copy = type(template)(params, **given)
    except TypeError as error:
        raise _NotMadeAgainError(
            "optimizer: expected a class that can be made again over the shards of a rank, found "
            f"{type(template).__name__}, whose __init__ takes neither its parameters alone nor with the options in its "
            f"defaults: {error}. Give its other arguments defaults"
        ) from error
    copy.param_groups[0].update(options)
    return copy


def check_elementwise(factory: OptimizerFactory) -> None:
    """Raises ValueError unless the optimizer treats every element by itself, so that it can run on shards.

    Tried on a small matrix: three steps on the whole and on its flat halves must give the same values.
    """
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(8, BLOCK_NUMEL // 8, generator=generator)
    gradients = [torch.randn(whole.shape, generator=generator) for _ in range(3)]
    half = whole.numel() // 2
    results = []
    name = "the optimizer"
    for parts in ([whole.shape], [(half,), (half,)]):
        values = torch.split(whole.clone().reshape(-1), [torch.Size(shape).numel() for shape in parts])
        params = [nn.Parameter(v.clone().view(shape)) for v, shape in zip(values, parts, strict=True)]
        try:
            optimizer = factory(params)
            name = type(optimizer).__name__
            for gradient in gradients:
                pieces = torch.split(gradient.reshape(-1), [p.numel() for p in params])
                for param, piece in zip(params, pieces, strict=True):
                    param.grad = piece.clone().view(param.shape)
                optimizer.step()
        except _NotMadeAgainError:
            raise
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise ValueError(
                f"optimizer: expected a torch optimizer that updates each element by itself, found {name}, "
                f"which failed on a flat parameter: {error}"
            ) from error
        results.append(torch.cat([param.detach().reshape(-1) for param in params]))
    if not torch.allclose(results[0], results[1], rtol=1e-6, atol=1e-9):
        raise ValueError(
            f"optimizer: expected a torch optimizer that updates each element by itself, found {name}, whose result "
            "depends on the shape of the parameter; shards of a parameter cannot be updated one by one. Use an "
            "elementwise one (AdamW, SGD, Lion, ...)."
        )
