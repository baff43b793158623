"""Which optimizer of ours does what a torch optimizer of the caller's does; and whether that can run on shards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..optimizers.optimizer import Optimizer
from ..optimizers.table import OPTIMIZERS
from .layout import BLOCK_NUMEL

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def record_like(optimizer: torch.optim.Optimizer) -> Optimizer | None:
    """The optimizer of ours that does what this one of torch's does, where there is one for all its options."""
    updates = _class_that_updates(type(optimizer))
    twins = _torch_twins()
    if updates not in twins:
        return None
    # AdamW is Adam with another value of an option: which of them it is, the options say.
    alike = [record for twin, record in twins.items() if issubclass(twin, updates) or issubclass(updates, twin)]
    fitting = (one for one in alike if all(takes_options(one, options) for options in optimizer.param_groups))
    record = next(fitting, None)
    if record is None:
        return None
    kept = {record.states_for(options) for options in optimizer.param_groups}
    return record if len(kept) == 1 else None


def takes_options(record: Optimizer, options: Mapping[str, Any]) -> bool:
    """Whether the optimizer of ours does what torch's does with the options of a parameter group."""
    if any(options.get(name) for name in ("amsgrad", "maximize", "capturable", "differentiable")):
        return False
    if any(options.get(name, value) != value for name, value in record.torch_options.items()):
        return False
    return all(isinstance(value, (int, float, bool, str, tuple, list, type(None))) for value in options.values())


def _torch_twins() -> dict[type[torch.optim.Optimizer], Optimizer]:
    return {record.torch_twin: record for record in OPTIMIZERS.values() if record.torch_twin is not None}


def _class_that_updates(cls: type) -> type:
    """The class itself, or the one that it derives from with nothing but an `__init__` of its own."""
    twins = _torch_twins()
    while cls not in twins and not any(_is_changed(cls, name) for name in vars(cls)):
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
