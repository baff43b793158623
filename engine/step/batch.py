"""Split a batch into microbatches, move it to the device, call the model with it, and find the loss in the output.

`ModelCall` is the way of the engine; with `parallel.sequence` it gives the model this rank's part of the tokens.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ...comm import World
from ...kernels.fused_loss import loss_only
from ...offload import sent
from ...parallel.split_self_check import SplitSelfCheck
from ...parallel.vocab_parallel import VocabParallelLogits
from ...pipe.split.trees import leaves, map_leaves
from ..model.given_model import LossFn
from ..model.sequences import Sequences

MarkInput = Callable[[Tensor], Tensor]
"""Marks an input that requires a gradient: see `GradientScale.mark_input`."""


def microbatches(batch: Any, count: int, rows: int | None) -> Iterator[Any]:
    """Yield the `count` microbatches of a batch, split along dimension 0, or drawn from an iterator.

    rows: the rows that each microbatch must have; None: any number. Values without a dimension 0 go to each
    microbatch. Raises ValueError if the rows do not fit.
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
            f"batch: expected tensors of the same size along dimension 0, found sizes {sorted(sizes)}; "
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
    # The caller's object itself: `map_tensors` makes new containers, and a dictionary of any mapping.
    if count == 1:
        yield batch
        return
    for index in range(count):
        yield map_tensors(batch, partial(_part, index, count))


def tokens_in(batch: Any) -> tuple[int, int]:
    """Return (rows, length) of the first tensor of integers with 2 or more dimensions; else (0, 0)."""
    for tensor in _tensors(batch):
        if tensor.dim() >= 2 and not tensor.is_floating_point() and tensor.dtype != torch.bool:
            return tensor.shape[0], tensor.shape[1]
    return 0, 0


def call(model: nn.Module, batch: Any) -> Any:
    """Return model(**batch) for a mapping, model(*batch) for a tuple or list, model(batch) for anything else."""
    if isinstance(batch, (tuple, list)):
        return forward(model, batch, {})
    return forward(model, (), batch) if isinstance(batch, Mapping) else forward(model, (batch,), {})


def forward(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return model(*args, **kwargs). Raise ValueError if a layer got another dtype than it computes in.

    Any other error gets a note: the innermost module that it came through, and the arguments of that module.
    """
    try:
        return model(*args, **kwargs)
    except Exception as error:
        # Frames of `_call_impl` have each module that the error came through, with its arguments. The last is the
        # innermost.
        calls = [
            frame.f_locals
            for frame, _ in traceback.walk_tb(error.__traceback__)
            if frame.f_code is nn.Module._call_impl.__code__
        ]
        if not calls:
            raise  # in a compiled forward no module is called
        module, args, kwargs = (calls[-1][name] for name in ("self", "args", "kwargs"))
        name = next((f"'{name}'" for name, part in model.named_modules() if part is module and name), "the model")
        # Only if torch's text speaks of dtypes: a layer that casts its inputs may well take another dtype than its
        # weights'.
        mismatch = _mismatch(module, [*args, *kwargs.values()]) if _SPEAKS_OF_DTYPES.search(str(error)) else None
        if mismatch is not None:
            weight, tensor = mismatch
            dtype = getattr(module, weight).dtype
            if tensor.is_floating_point():
                advice = f"no values that the model makes: cast these before the layer, for example x.to({dtype})"
            else:
                advice = "no integers, since these may be indices: pass values as floats, for example x.float()"
            raise ValueError(
                f"batch: expected {dtype} for {name} ({type(module).__name__}), the dtype of its {weight}, found "
                f"{tensor.dtype} of shape {tuple(tensor.shape)}. With auto_cast true the engine casts floating-point "
                f"tensors of a batch, but {advice}. torch says: " + str(error).splitlines()[0]
            ) from error
        described = type(module).__name__ if any(module.children()) else str(module)
        given = [*map(_brief, args), *(f"{key}={_brief(value)}" for key, value in kwargs.items())]
        error.add_note(f"in the forward of {name}, {described}, which was given ({', '.join(given)})")
        raise


_SPEAKS_OF_DTYPES = re.compile(r"dtype|scalar type|Input type|not implemented for '")


def _mismatch(module: nn.Module, given: Any) -> tuple[str, Tensor] | None:
    """Return a weight's name and an input tensor of another dtype; None if all dtypes agree."""
    weights = [(name, param) for name, param in module.named_parameters(recurse=False) if param.is_floating_point()]
    for tensor in _tensors(given):
        for name, param in weights:
            if tensor.dtype != param.dtype and not isinstance(module, nn.Embedding):
                return name, tensor
    return None


def _brief(value: Any) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def loss_of(output: Any, batch: Any, loss_fn: Callable[[Any, Any], Tensor] | None) -> Tensor:
    """Return the loss, (): loss_fn(output, batch), else the output itself, its `.loss`, ["loss"] or [0].

    Raises ValueError if this is no tensor with a single element.
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
            "loss: expected a tensor with a single element as the model's output, or as its .loss, "
            f'["loss"] or [0], found {found}; give initialize(..., loss_fn=lambda output, batch: ...)'
        )
    return loss.reshape(()) if loss.dim() else loss


class ModelCall:
    """Calls the model for a microbatch: `ready`, then `output`, then `loss`."""

    def __init__(
        self,
        loss_fn: LossFn,
        sequences: Sequences | None,
        splits: SplitSelfCheck | None,
        world: World,
        dtype: torch.dtype | None,
        rows_per_microbatch: int | None,
    ) -> None:
        """sequences: splits tokens over ranks. splits: compares split layers with whole layers.

        dtype: of floating-point inputs; None: unchanged. rows_per_microbatch: None: any number.
        """
        self.sequences = sequences
        self.splits = splits
        self._loss_fn = loss_fn
        self._world, self._dtype = world, dtype
        self._rows_per_microbatch = rows_per_microbatch

    def microbatches_of(self, batch: Any, count: int) -> Iterator[Any]:
        """Yield `count` microbatches of this rank's share of a batch, or of an iterator. Raises ValueError."""
        found = microbatches(batch, count, self._rows_per_microbatch)
        return self._world.progress.drawn(found) if self._world.progress.is_on else found

    def prepared(self, batch: Any, mark: MarkInput) -> Any:
        """Return a batch on the device, with floating-point tensors in the compute dtype.

        mark: called with each tensor that requires a gradient, before it is moved.
        """
        device, dtype = self._world.device, self._dtype

        def move(tensor: Tensor) -> Tensor:
            wants_cast = dtype is not None and tensor.is_floating_point()
            # If the tensor requires a gradient, its copy is part of the graph.
            tensor = mark(tensor) if tensor.requires_grad else sent(tensor, device)
            # A copy to the host must have ended when the host computes with it.
            return tensor.to(device, dtype if wants_cast else tensor.dtype, non_blocking=device.type != "cpu")

        return map_tensors(batch, move)

    def ready(self, batch: Any, mark: MarkInput) -> Any:
        """Return this rank's part of a batch, on the device and in the compute dtype. mark: see `prepared`."""
        if self.sequences is None:
            return self.prepared(batch, mark)
        return self.sequences.part(batch).changed(partial(self.prepared, mark=mark))

    def ready_by_hand(self, args: Sequence[Any], kwargs: Mapping[str, Any], mark: MarkInput) -> Any:
        """Return the keyword arguments of a call as `ready` does a batch."""
        if self.sequences is None:
            return self.prepared(kwargs, mark)
        return self.sequences.part_of_call(args, kwargs).changed(partial(self.prepared, mark=mark))

    def run(self, ready: Any, forward: Callable[[], Any]) -> Any:
        """Return the result of `forward`, a forward of the model with these inputs."""
        return forward() if self.sequences is None else self.sequences.run(ready, forward)

    def output(self, model: nn.Module, ready: Any) -> Any:
        """Return the model's output. Only the values that the loss needs may be read in it."""
        with nullcontext() if self._loss_fn is not None else loss_only():  # fused models then compute no logits
            return call(model, ready) if self.sequences is None else self.run(ready, lambda: call(model, ready))

    def loss(self, output: Any, ready: Any) -> Tensor:
        """Return the loss, (); for a part of the tokens, its share of the mean over all tokens."""
        factor = None if self.sequences is None else ready.factor
        # No token of this part has a label, and a user's loss of no labels may be NaN. The backward must run all the
        # same, since other ranks wait in its collectives.
        if factor == 0 and self._loss_fn is not None and (found := _differentiable(output)):
            return torch.stack([one.reshape(-1)[:0].sum() for one in found]).sum()  # 0, with the graph of the output
        loss = loss_of(output, ready, self._loss_fn)
        return loss if factor is None else _weighted(loss, factor)

    def weighted(self, output: Any, ready: Any) -> Any:
        """Return the output of a call by hand; the mean loss of a part of the tokens becomes its share."""
        factor = None if self.sequences is None else ready.factor
        is_loss = self._loss_fn is None or (isinstance(output, Tensor) and output.numel() == 1)
        return output if factor is None or not is_loss else _weighted(loss_of(output, ready, None), factor)

    def own(self, x: Tensor, fill: float) -> Tensor:
        """Return this rank's part of x, (rows, tokens, ...). Without shared sequences that is all of x."""
        return x if self.sequences is None else self.sequences.own(x, fill)

    def whole_output(self, output: Any, tokens: int) -> Any:
        """See `Engine.whole_output`."""

        def whole(leaf: Any) -> Any:
            if isinstance(leaf, VocabParallelLogits):
                # Detached first, so that the gather of the logits is no part of the graph.
                leaf = leaf.detach().whole()
            if not isinstance(leaf, Tensor):
                return leaf
            return leaf.detach() if self.sequences is None else self.sequences.joined(leaf, tokens)

        return map_leaves(whole, output)


def _weighted(loss: Tensor, factor: float) -> Tensor:
    # A part of the sequence without targets has the mean of no losses, NaN, and 0 * NaN is NaN. `where` has the graph
    # of the loss, and gives it a gradient of 0.
    return loss * factor if factor else torch.where(torch.ones_like(loss, dtype=torch.bool), 0.0, loss)


def _differentiable(output: Any) -> list[Tensor]:
    found = (one.own if isinstance(one, VocabParallelLogits) else one for one in leaves(output))
    return [one for one in found if isinstance(one, Tensor) and one.requires_grad]


def replace_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Replace each tensor in a value, once. Mutable containers stay the same objects."""
    return _replaced(value, change, {})


def _replaced(value: Any, change: Callable[[Tensor], Tensor], seen: dict[int, Any]) -> Any:
    """See `replace_tensors`. seen: id -> (value, result); it holds the values, so that no id is used twice.

    No closure: that would be a reference cycle, and hold the graph of a forward until the garbage collector runs.
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
    # Outputs such as dataclasses. A module, a class or a Python module in an output is no result, and is not searched.
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


def map_tensors(batch: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a batch with `change(tensor)` in place of each tensor. Mappings become dictionaries."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, (tuple, list)):
        changed = [map_tensors(value, change) for value in batch]
        return type(batch)(*changed) if hasattr(batch, "_fields") else type(batch)(changed)
    if isinstance(batch, Mapping):
        return {key: map_tensors(value, change) for key, value in batch.items()}
    return batch


def described(value: Any) -> Any:
    """Return a batch without its values, for JSON: shapes and dtypes in their nesting."""
    if isinstance(value, Tensor):
        return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {"items": {str(key): described(one) for key, one in value.items()}}
    if isinstance(value, (tuple, list)):
        return {"list": [described(one) for one in value]}
    return {"value": value if isinstance(value, (str, int, float, bool)) else None}


def of_whole(description: Any, size: int) -> Any:
    """Return the description of a whole batch, from that of a part: `size` ranks share its sequences.

    See `SequenceData`.
    """
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
    """Return a batch on the meta device from its description."""
    if "shape" in description:
        return torch.empty(description["shape"], dtype=getattr(torch, description["dtype"]), device="meta")
    if "items" in description:
        return {key: made(one) for key, one in description["items"].items()}
    if "list" in description:
        return tuple(made(one) for one in description["list"])
    return description["value"]
