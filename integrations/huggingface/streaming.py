"""`from_pretrained` that reads nothing yet: values go from the files to the shards when an engine is made.

[Note: how weights stream]
In the callable that is given to `lowtide.initialize` a model is built on the meta device, and what is done to its
tensors is recorded, to be done again one parameter at a time (`engine/model/deferred.py`). So it is enough that what
`from_pretrained` reads is a tensor on the meta device as well, into which the bytes of a mapped file are copied: that
copy is recorded, and so is all that transformers makes of it, such as the experts that it puts into one tensor. What a
rank has of a file is its mapping; of that it touches the pages of its own shards, and what is converted or cast is in
memory for one parameter at a time.

[Note: the numbers of plain from_pretrained]
transformers constructs on the meta device, where constructors draw nothing, and draws for what no file has alone. So
what constructors would draw here is not recorded either (`_NoDraws`), and the new head of a model, or adapters
that are put on it, have the bits that they have without lowtide.
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
    """A model would be read where it is built with memory."""


def from_pretrained(model_class: Any, folder: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
    """`model_class.from_pretrained(folder, ...)` whose weights come when the engine is made, into the shards.

    model_class: `AutoModelForCausalLM`, or any other that has `from_pretrained`. folder, args, kwargs: as it takes
    them, `dtype` too. Call it in the callable that is given to `lowtide.initialize`, or in a Trainer's `model_init`:

        engine = lowtide.initialize(lambda: from_pretrained(AutoModelForCausalLM, "folder"), config)

    Raises ValueError elsewhere, and for files that are not safetensors and weights that are quantized.
    """
    with streaming():
        return model_class.from_pretrained(folder, *args, **kwargs)


@contextmanager
def streaming() -> Iterator[None]:
    """A context in which every `from_pretrained` of transformers reads its weights later; see `from_pretrained`."""
    if not torch.empty(0).is_meta:
        raise ReadAtOnceError(
            "lowtide.huggingface.streaming: expected a model that is built without memory, found one that would be "
            f"read at once; call it {_WHERE}. If the log says that this callable cannot be recorded, call "
            "transformers' own from_pretrained in it"
        )
    from transformers import PreTrainedModel
    from transformers.initialization import no_init_weights

    finalize = PreTrainedModel._finalize_model_loading
    contexts = PreTrainedModel.get_init_context.__func__  # type: ignore[attr-defined]  # of a class method

    def contexts_without_draws(cls: Any, *args: Any, **kwargs: Any) -> list[Any]:
        return [*contexts(cls, *args, **kwargs), no_init_weights(), _NoDraws()]

    def finish(model: Any, load_config: Any, loading_info: Any) -> Any:
        """What is missing in the files is made on the meta device too, and initialized there."""
        return finalize(model, _on_meta(load_config), loading_info)

    # Without threads: what happens in others is not recorded.
    with (
        mock.patch.object(PreTrainedModel, "_load_pretrained_model", staticmethod(_load)),
        mock.patch.object(PreTrainedModel, "_finalize_model_loading", staticmethod(finish)),
        mock.patch.object(PreTrainedModel, "get_init_context", classmethod(contexts_without_draws)),
        mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}),
    ):
        yield


class _NoDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What draws random numbers in it on the meta device is not recorded; see [Note: the numbers of plain ...]."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `engine/model/recording.py`

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func._schema.is_mutable:  # the kernels of some import torch's compiler, and leave the tensor as it is
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
    """What transformers does here, with tensors that are read later."""
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
            f"{what}: expected safetensors files, found {others[0]}; save the model once by save_pretrained, or give "
            "initialize the model itself"
        )
    if load_config.hf_quantizer is not None:
        raise ValueError(
            f"{what}: expected weights in a floating-point type, found quantized ones; give initialize the model itself"
        )
    if load_config.device_map is not None:
        raise ValueError(f"{what}: expected no device_map, found one: the config says where a model is; leave it out")


class _Later:
    """A tensor in a file, of which transformers takes all, in the place of a slice of safetensors."""

    def __init__(self, place: TensorPlace, mapping: mmap.mmap) -> None:
        """mapping: of the file, as long as it is read."""
        self._info = place.info
        self._offset = place.offset
        self._mapping = mapping

    def __getitem__(self, index: Any) -> Tensor:
        """On the meta device; index: `...`."""
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
        # A private mapping: nothing that is done to a tensor comes to the file.
        mapping = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    return {name: _Later(place, mapping) for name, place in places.items()}
