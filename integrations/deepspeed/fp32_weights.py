"""`deepspeed.utils.zero_to_fp32`: the fp32 weights of a checkpoint, in a single process."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.chunk_view import whole_values
from ..checkpoint.export import export_source, parse_bytes
from ..checkpoint.files import folder_path
from ..checkpoint.folder import CheckpointFolder
from .messages import note_frozen_are_kept


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """Return the master weights and buffers of a checkpoint by the model's names, on the CPU. tag: None: the latest.

    Reads lowtide's format; DeepSpeed's needs `lowtide checkpoint import` first. lazy_mode has no effect, and
    exclude_frozen_parameters is a warning: the checkpoint does not say which parameters were frozen.
    Raises NoCheckpointError, CheckpointError.
    """
    if exclude_frozen_parameters:
        note_frozen_are_kept("zero_to_fp32")
    found = CheckpointFolder(folder_path(checkpoint_dir)).open(tag)
    values = whole_values(found.weights)
    for alias, name in found.manifest.aliases.items():
        # The same tensor: a tied parameter stays tied in memory and in torch.save.
        values[alias] = values[name]
    return values


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Move the model to the CPU, load the checkpoint's weights into it, and return it."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    **ignored: Any,
) -> None:
    """Write the fp32 weights by torch.save as a single file, output_dir/pytorch_model.bin.

    safe_serialization: write safetensors instead, in files of at most max_shard_size ("5GB") each, with an index.
    """
    if safe_serialization:
        if exclude_frozen_parameters:
            note_frozen_are_kept("zero_to_fp32")
        weights = CheckpointFolder(folder_path(checkpoint_dir)).open(tag).weights
        export_source(weights, output_dir, shard_bytes=parse_bytes(max_shard_size))
        return
    values = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    os.makedirs(output_dir, exist_ok=True)
    torch.save(values, os.path.join(output_dir, "pytorch_model.bin"))
