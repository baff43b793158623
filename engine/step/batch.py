"""Batches: how one is split into microbatches, moved, and passed to a model; how a loss is found in an output."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ...offload import sent


def microbatches(batch: Any, count: int, rows: int | None) -> Iterator[Any]:
    """The `count` microbatches of a batch, split along dimension 0; or drawn from an iterator.

    rows: the rows that each microbatch must have, or None for any. Values without a dimension 0 go to every one.
    Raises ValueError where the rows do not fit.
    """
    if isinstance(batch, Iterator):
        for index in range(count):
            try:
                drawn = next(batch)
            except StopIteration:
                raise ValueError(
                    f"the iterator given to train_step ended after {index} of {count} microbatches "
                    "(gradient_accumulation_steps); give it an iterator that does not end within a step"
                ) from None
            found = {tensor.shape[0] for tensor in _tensors(drawn) if tensor.dim()}
            if rows is not None and found and rows not in found:
                raise ValueError(
                    f"batch: expected microbatches of {rows} rows (train_micro_batch_size_per_gpu) from the iterator "
                    f"given to train_step, found {_listed(found)} in microbatch {index}. Change the config, or the "
                    "loader's batch size; drop_last=True leaves out a loader's last, smaller batch."
                )
            yield drawn
        return
    sizes = {tensor.shape[0] for tensor in _tensors(batch) if tensor.dim()}
    if len(sizes) > 1:
        raise ValueError(
            f"batch: expected tensors of one size along dimension 0, found sizes {sorted(sizes)}; "
            "train_step splits every tensor of a batch there"
        )
    total = sizes.pop() if sizes else count
    expected = rows * count if rows is not None else None
    if expected is not None and total != expected:
        raise ValueError(
            f"batch: expected {expected} rows on this rank = train_micro_batch_size_per_gpu({rows}) x "
            f"gradient_accumulation_steps({count}), found {total}. "
            "Change the config, or the loader's batch size; "
            "drop_last=True leaves out a loader's last, smaller batch."
        )
    if total % count:
        raise ValueError(
            f"batch: expected a number of rows that gradient_accumulation_steps ({count}) divides, found {total}"
        )
    if count == 1:
        yield batch
        return
    for index in range(count):
        yield _map_tensors(batch, partial(_part, index, count))


def prepared(
    batch: Any,
    device: torch.device,
    dtype: torch.dtype | None,
    mark: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> Any:
    """The batch on the device, floating-point tensors in `dtype` where one is given.

    mark: goes before, on each that requires a gradient.
    """

    def move(tensor: Tensor) -> Tensor:
        wants_cast = dtype is not None and tensor.is_floating_point()
        # Of one that requires a gradient the copy is a part of the graph.
        tensor = mark(tensor) if tensor.requires_grad else sent(tensor, device)
        return tensor.to(device, dtype if wants_cast else tensor.dtype, non_blocking=True)

    return _map_tensors(batch, move)


def tokens_in(batch: Any) -> tuple[int, int]:
    """(rows, length) of the first tensor of whole numbers with two dimensions; (0, 0) where there is none."""
    for tensor in _tensors(batch):
        if tensor.dim() >= 2 and not tensor.is_floating_point() and tensor.dtype != torch.bool:
            return tensor.shape[0], tensor.shape[1]
    return 0, 0


def call(model: nn.Module, batch: Any) -> Any:
    """model(**batch) for a mapping, model(*batch) for a tuple or list, model(batch) for anything else."""
    if isinstance(batch, (tuple, list)):
        return forward(model, batch, {})
    return forward(model, (), batch) if isinstance(batch, Mapping) else forward(model, (batch,), {})


def forward(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """model(*args, **kwargs). Raises ValueError where a layer was given another dtype than it computes in.

    Any other error gets a note of the innermost module that it came through, and of what that was given.
    """
    try:
        return model(*args, **kwargs)
    except Exception as error:
        calls = [
            frame.f_locals
            for frame, _ in traceback.walk_tb(error.__traceback__)
            if frame.f_code is nn.Module._call_impl.__code__
        ]
        if not calls:
            raise  # a compiled forward has no call of a module
        module, args, kwargs = (calls[-1][name] for name in ("self", "args", "kwargs"))
        name = next((f"'{name}'" for name, part in model.named_modules() if part is module and name), "the model")
        mismatch = _mismatch(module, [*args, *kwargs.values()]) if _SPEAKS_OF_DTYPES.search(str(error)) else None
        if mismatch is not None:
            weight, tensor = mismatch
            raise ValueError(
                f"batch: expected {getattr(module, weight).dtype} for {name} ({type(module).__name__}), the dtype of "
                f"its {weight}, found {tensor.dtype} of shape {tuple(tensor.shape)}. Of a batch, floating-point "
                "tensors are cast (auto_cast) and integers are not, which may be indices: give values as floats, for "
                "example x.float(). In torch's words: " + str(error).splitlines()[0]
            ) from error
        described = type(module).__name__ if any(module.children()) else str(module)
        given = [*map(_brief, args), *(f"{key}={_brief(value)}" for key, value in kwargs.items())]
        error.add_note(f"in the forward of {name}, {described}, which was given ({', '.join(given)})")
        raise


_SPEAKS_OF_DTYPES = re.compile(r"dtype|scalar type|Input type|not implemented for '")


def _mismatch(module: nn.Module, given: Any) -> tuple[str, Tensor] | None:
    """A weight of the module, and what it was given in another dtype."""
    weights = [(name, param) for name, param in module.named_parameters(recurse=False) if param.is_floating_point()]
    for tensor in _tensors(given):
        for name, param in weights:
            if tensor.dtype != param.dtype and not isinstance(module, nn.Embedding):
                return name, tensor
    return None


def _brief(value: Any) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def loss_of(output: Any, batch: Any, loss_fn: Callable[[Any, Any], Tensor] | None) -> Tensor:
    """The loss: loss_fn(output, batch), else the output itself, its `.loss`, ["loss"] or [0].

    Raises ValueError where none of them is a tensor with one element.
    """
    if loss_fn is not None:
        loss = loss_fn(output, batch)
    elif isinstance(output, Tensor):
        loss = output
    elif getattr(output, "loss", None) is not None:
        loss = output.loss
    elif isinstance(output, Mapping) and "loss" in output:
        loss = output["loss"]
    elif isinstance(output, (tuple, list)) and output:
        loss = output[0]
    else:
        loss = None
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{type(output).__name__}"
        raise ValueError(
            "loss: expected a tensor with one element as the model's output, or as its .loss, "
            f'["loss"] or [0], found {found}; give initialize(..., loss_fn=lambda output, batch: ...)'
        )
    return loss.reshape(()) if loss.dim() else loss


def replace_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The value with other tensors in it, each changed once; what can be written to is the object that it was."""
    return _replaced(value, change, {})


def _replaced(value: Any, change: Callable[[Tensor], Tensor], seen: dict[int, Any]) -> Any:
    """seen: by identity; with what it is of, so that identities are not given to others.

    No closure, which would hold itself, and with it the graph of a forward until Python looks for cycles.
    """
    if id(value) in seen:
        return seen[id(value)][1]
    if isinstance(value, Tensor):
        result: Any = change(value)
    elif isinstance(value, tuple):
        parts = [_replaced(part, change, seen) for part in value]
        result = type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    else:
        result = value
    seen[id(value)] = value, result
    replaced = partial(_replaced, change=change, seen=seen)
    if isinstance(value, MutableMapping):
        _replace_items(value, list(value.items()), replaced)
    elif isinstance(value, list):
        _replace_items(value, list(enumerate(value)), replaced)
    elif hasattr(value, "__dict__") and not isinstance(value, (Tensor, nn.Module, type, ModuleType)):
        _replace_items(vars(value), list(vars(value).items()), replaced)
    return result


def _replace_items(container: Any, items: Iterable[tuple[Any, Any]], replaced: Callable[[Any], Any]) -> None:
    for key, item in items:
        other = replaced(item)
        if other is not item:
            container[key] = other


def _listed(sizes: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(sizes)))


def _part(index: int, count: int, tensor: Tensor) -> Tensor:
    return tensor.chunk(count)[index] if tensor.dim() else tensor


def _tensors(batch: Any) -> Iterable[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from _tensors(value)
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)


def _map_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, (tuple, list)):
        changed = [_map_tensors(value, change) for value in batch]
        return type(batch)(*changed) if hasattr(batch, "_fields") else type(batch)(changed)
    if isinstance(batch, Mapping):
        return {key: _map_tensors(value, change) for key, value in batch.items()}
    return batch


def described(value: Any) -> Any:
    """A batch without its values: shapes and dtypes, in their nesting."""
    if isinstance(value, Tensor):
        return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {"items": {str(key): described(one) for key, one in value.items()}}
    if isinstance(value, (tuple, list)):
        return {"list": [described(one) for one in value]}
    return {"value": value if isinstance(value, (str, int, float, bool)) else None}


def of_whole(description: Any, size: int) -> Any:
    """What a batch was like, of whose sequences `size` ranks share this part: see `SequenceData`."""
    items = description.get("items", {})
    if size == 1 or "position_ids" not in items:
        return description
    length = items["position_ids"]["shape"][1]

    def grown(one: Any) -> Any:
        shape = one.get("shape", [])
        if len(shape) < 2 or shape[1] != length:
            return one
        return {**one, "shape": [shape[0], length * size, *shape[2:]]}

    return {"items": {key: grown(one) for key, one in items.items()}}


def made(description: Any) -> Any:
    """A batch like the one that was described, without memory."""
    if "shape" in description:
        return torch.empty(description["shape"], dtype=getattr(torch, description["dtype"]), device="meta")
    if "items" in description:
        return {key: made(one) for key, one in description["items"].items()}
    if "list" in description:
        return tuple(made(one) for one in description["list"])
    return description["value"]
