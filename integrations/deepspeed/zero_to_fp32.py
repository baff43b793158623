"""What scripts import as `deepspeed.utils.zero_to_fp32`: the fp32 weights of a checkpoint, in one process."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.files import folder_path
from ..checkpoint.folder import CheckpointFolder
from ..checkpoint.fragment import Fragment


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """The master weights and buffers of a checkpoint by the model's own names, on the CPU. tag: None for the latest.

    Of lowtide's checkpoints, and of those that `lowtide checkpoint import` has made of DeepSpeed's. lazy_mode has no
    effect. Raises NoCheckpointError, CheckpointError.
    """
    found = CheckpointFolder(folder_path(checkpoint_dir)).open(tag)
    values: dict[str, Tensor] = {}
    for name, info in found.weights.tensors.items():
        flat = torch.empty(info.shape, dtype=info.dtype).view(-1)
        found.weights.read([Fragment(name, tuple(info.shape), 0, flat)])
        values[name] = flat.view(info.shape)
    for alias, name in found.aliases.items():
        values[alias] = values[name]
    return values


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """The model, on the CPU, with these weights. What has them already is left alone."""
    model = model.cpu()
    values, own = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), model.state_dict()
    others = {name: value for name, value in values.items() if name not in own or not _is_same(own[name], value)}
    model.load_state_dict(others, strict=False)
    return model


def _is_same(own: Tensor, value: Tensor) -> bool:
    return own.dtype == value.dtype and torch.equal(own, value)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    **others: Any,
) -> None:
    """Writes them by torch.save to output_dir/pytorch_model.bin, a single file; as safetensors use `lowtide export`."""
    values = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    os.makedirs(output_dir, exist_ok=True)
    torch.save(values, os.path.join(output_dir, "pytorch_model.bin"))
