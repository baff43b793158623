"""`from_pretrained` that reads nothing: values go from files to shards when an engine is made.

[Note: how weights stream]
The callable given to `lowtide.initialize` builds the model on the meta device, with its tensor operations recorded, to
be repeated a parameter at a time (`engine/model/deferred.py`). So `from_pretrained` only needs to read meta tensors
into which the bytes of a mapped file are copied. That copy is recorded, and so is everything that transformers makes
from it, for example experts stacked into a tensor. A rank maps each file and touches only the pages of its shards.
Converted or cast values are in memory for a parameter at a time.

[Note: the numbers of plain from_pretrained]
transformers constructs on the meta device, without draws by constructors, and then draws only for weights that no
file has. So draws of constructors are not recorded (`_NoDraws`), and a new head or adapters have the same bits as
without lowtide.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..checkpoint.safetensors_files import TensorPlace, read_header
from ..engine.model.recording import MappedTensor

_WHERE = "in the callable that is given to lowtide.initialize, or in the model_init of a Trainer"


class ReadAtOnceError(ValueError):
    """`from_pretrained` was called outside the contexts that delay it."""


def from_pretrained(model_class: Any, folder: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
    """Run `model_class.from_pretrained(folder, ...)` without reading: weights go to the shards when an engine is made.

    model_class: `AutoModelForCausalLM` or any class with `from_pretrained`. It gets folder, args and kwargs, also
    `dtype`. Call it in the callable given to `lowtide.initialize`, or in a Trainer's `model_init`:

        engine = lowtide.initialize(lambda: from_pretrained(AutoModelForCausalLM, "folder"), config)

    Raises ValueError elsewhere, for files that are not safetensors, and for quantized weights.
    """
    with streaming():
        return model_class.from_pretrained(folder, *args, **kwargs)


@contextmanager
def streaming() -> Iterator[None]:
    """Open a context in which every `from_pretrained` of transformers reads later: see `from_pretrained`."""
    if not torch.empty(0).is_meta:
        raise ReadAtOnceError(
            "lowtide.huggingface.streaming: expected a model built on the meta device, found a model with memory, so "
            f"this would read its files at once. Call it {_WHERE}. If the log says that this callable cannot be "
            "recorded, call transformers' from_pretrained in it instead"
        )
    from transformers import PreTrainedModel
    from transformers.initialization import no_init_weights

    finalize = PreTrainedModel._finalize_model_loading
    contexts = PreTrainedModel.get_init_context.__func__  # type: ignore[attr-defined]  # of a class method

    def contexts_without_draws(cls: Any, *args: Any, **kwargs: Any) -> list[Any]:
        return [*contexts(cls, *args, **kwargs), no_init_weights(), _NoDraws()]

    def finish(model: Any, load_config: Any, loading_info: Any) -> Any:
        """Make weights that no file has on the meta device too, and initialize them on it."""
        return finalize(model, _on_meta(load_config), loading_info)

    # Without loader threads: only this thread is recorded.
    with (
        mock.patch.object(PreTrainedModel, "_load_pretrained_model", staticmethod(_load)),
        mock.patch.object(PreTrainedModel, "_finalize_model_loading", staticmethod(finish)),
        mock.patch.object(PreTrainedModel, "get_init_context", classmethod(contexts_without_draws)),
        mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}),
    ):
        yield


class _NoDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Does not record random draws on the meta device: see [Note: the numbers of plain from_pretrained]."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `engine/model/recording.py`

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func._schema.is_mutable:  # some meta kernels import torch's compiler; the tensor stays as it is anyway
            return args[0]
        with _disable_current_modes():
            found = func(*args, **kwargs)
        return torch.empty_strided(found.shape, found.stride(), dtype=found.dtype, device=found.device)


def _load(
    model: Any,
    state_dict: Mapping[str, Any] | None,
    checkpoint_files: Sequence[str] | None,
    load_config: Any,
    expected_keys: Any = None,
) -> Any:
    """Load as transformers does, with tensors that are read later."""
    from transformers.core_model_loading import convert_and_load_state_dict_in_model

    _check(type(model).__name__, checkpoint_files, load_config)
    assert checkpoint_files is not None
    found: dict[str, _Later] = {}
    for file in checkpoint_files:
        found |= _later_of(file)
    return convert_and_load_state_dict_in_model(model, found, _on_meta(load_config), None)


def _on_meta(load_config: Any) -> Any:
    return replace(load_config, device_map={"": "meta"})


def _check(model: str, files: Sequence[str] | None, load_config: Any) -> None:
    what = f"from_pretrained of a {model} {_WHERE}"
    others = [str(file) for file in files or ["no files"] if not str(file).endswith(".safetensors")]
    if others:
        raise ValueError(
            f"{what}: expected safetensors files, found {others[0]}. Save the model once by save_pretrained, or pass "
            "the model itself to initialize"
        )
    if load_config.hf_quantizer is not None:
        raise ValueError(
            f"{what}: expected floating-point weights, found quantized weights. Pass the model itself to initialize"
        )
    if load_config.device_map is not None:
        raise ValueError(f"{what}: expected no device_map. The config places the model: leave device_map out")


class _Later:
    """A tensor in a file, in place of a slice of safetensors. transformers always reads the full slice."""

    def __init__(self, place: TensorPlace, mapping: mmap.mmap) -> None:
        """mapping: of the file; must stay open."""
        self._info = place.info
        self._offset = place.offset
        self._mapping = mapping

    def __getitem__(self, index: Any) -> Tensor:
        """Return a meta tensor with the recorded copy. index: `...`."""
        assert index is ..., index
        info = self._info
        later = torch.empty(info.shape, dtype=info.dtype)
        if not later.numel():
            return later
        values = torch.frombuffer(self._mapping, dtype=info.dtype, count=later.numel(), offset=self._offset)
        return later.copy_(values.view(info.shape).as_subclass(MappedTensor))

    def get_shape(self) -> list[int]:
        return list(self._info.shape)


def _later_of(file: str) -> dict[str, _Later]:
    places = read_header(Path(file))
    with open(file, "rb") as opened:
        # A private mapping: writes to a tensor do not reach the file.
        mapping = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    return {name: _Later(place, mapping) for name, place in places.items()}
