"""Operations on tensors without memory, as they are written down to be done again with values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class View:
    """A meta tensor as a view of a storage, by the storage's identity."""

    storage: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_conj: bool = False
    is_neg: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        return cls(
            tensor.untyped_storage()._cdata,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def of_values(self, base: Tensor) -> Tensor:
        """The same view of memory that has values."""
        whole = torch.empty(0, dtype=self.dtype, device=base.device)
        view = whole.set_(base.untyped_storage(), self.offset, self.shape, self.strides)
        view = view.conj() if self.is_conj else view
        return torch._neg_view(view) if self.is_neg else view


@dataclass(frozen=True)
class RecordedOperation:
    """In args and kwargs views stand for meta tensors. All is as it was then: the default dtype too."""

    function: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    outputs: list[View]
    filled: int | None  # the storage of which it writes every byte and reads none
    default_dtype: torch.dtype

    @classmethod
    def of(
        cls, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], outputs: list[Tensor], fills: bool = False
    ) -> RecordedOperation:
        """fills: it writes every element of its first argument, whatever that holds."""
        described, options = mapped(
            lambda leaf: View.of(leaf) if isinstance(leaf, Tensor) and leaf.is_meta else leaf, (args, kwargs)
        )
        filled = _whole_storage(tensors_in((args, kwargs))) if fills else None
        return cls(function, described, options, list(map(View.of, outputs)), filled, torch.get_default_dtype())

    @property
    def views(self) -> Iterator[View]:
        """What it reads and writes."""
        return _found(View, (self.args, self.kwargs, self.outputs))

    @property
    def written(self) -> Iterator[View]:
        """What it makes and changes."""
        return _found(View, (self.outputs, written_by(self.function, self.args, self.kwargs)))

    def with_own_copies(self) -> RecordedOperation:
        """The same, of tensors with values that nobody else changes."""
        args, kwargs = mapped(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs)

    @property
    def is_random(self) -> bool:
        """Whether it draws."""
        return draws(self.function)

    @property
    def copied(self) -> Tensor | None:
        """The tensor that it only copies, where that can stand for the copy: it is as the copy would be."""
        if self.function != torch.ops.aten.copy_.default or not isinstance(self.args[1], Tensor):
            return None
        target, source = self.args[0], self.args[1]
        found = target.shape, target.strides, 0, target.dtype
        return (
            source if found == (tuple(source.shape), source.stride(), source.storage_offset(), source.dtype) else None
        )

    def run(self, real: dict[int, Tensor]) -> None:
        """real: by storage, a tensor on the CPU that has it. What is made is put there."""
        if self.filled is not None and self.filled not in real:
            whole: View = self.args[0]
            real[self.filled] = torch.empty_strided(whole.shape, whole.strides, dtype=whole.dtype)

        def materialize(value: Any) -> Any:
            if isinstance(value, View):
                if value.storage not in real:
                    raise ValueError(
                        f"the model builder uses a tensor of shape {value.shape} that has no memory and that was not "
                        "made in the call, or in a way that cannot be replayed: expected tensors that the call makes; "
                        "or pass the constructed module to initialize in its place"
                    )
                return value.of_values(real[value.storage])
            return on_cpu(value)

        args, kwargs = mapped(materialize, (self.args, self.kwargs))
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.default_dtype)
        try:
            with torch.no_grad():
                result = self.function(*args, **kwargs)
        finally:
            torch.set_default_dtype(default)
        for view, tensor in zip(self.outputs, tensors_in(result), strict=True):
            if view.storage not in real:
                real[view.storage] = _laid_out_as(view, tensor)


# torch's own functions for trees take most of a recording's time: they look for classes that were registered.
def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """The tree of lists, tuples and dicts with each leaf changed."""
    if isinstance(tree, list | tuple):
        return type(tree)([mapped(change, one) for one in tree])
    return {key: mapped(change, one) for key, one in tree.items()} if isinstance(tree, dict) else change(tree)


def tensors_in(tree: Any) -> list[Tensor]:
    """In their order."""
    return list(_found(Tensor, tree))


def _found(kind: type[T], tree: Any) -> Iterator[T]:
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, list | tuple):
        for one in tree:
            yield from _found(kind, one)
    elif isinstance(tree, dict):
        for one in tree.values():
            yield from _found(kind, one)


def draws(function: Callable[..., Any]) -> bool:
    """Whether a function, of torch's dispatcher or of nn.init, draws random numbers."""
    tags = getattr(function, "tags", None)  # nn.init's has none, and is recorded because it draws
    return tags is None or torch.Tag.nondeterministic_seeded in tags


def written_by(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that a function of torch's dispatcher changes. torch._foreach_add_ gives none of them back."""
    schema = getattr(function, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    named = {argument.name: given for argument, given in zip(schema.arguments, args, strict=False)} | kwargs
    changed = (one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write)
    return [named[name] for name in changed if name in named]


def on_cpu(value: Any) -> Any:
    """An argument as it is where values are."""
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "meta" else value


def _whole_storage(inputs: list[Tensor]) -> int | None:
    """The storage of the first input, if that is all of it, row by row, and no other input lies in it."""
    target, others = View.of(inputs[0]), [View.of(tensor) for tensor in inputs[1:]]
    if target.offset or not inputs[0].is_contiguous() or inputs[0].nbytes != inputs[0].untyped_storage().nbytes():
        return None
    return None if any(other.storage == target.storage for other in others) else target.storage


def _laid_out_as(view: View, tensor: Tensor) -> Tensor:
    """The tensor with the strides that it had on the meta device: kernels for it (linalg.qr) may choose others."""
    if tuple(tensor.stride()) == view.strides or view.offset:
        return tensor
    return torch.empty_strided(view.shape, view.strides, dtype=view.dtype).copy_(tensor)
