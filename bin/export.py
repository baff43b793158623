"""`lowtide export`: the weights of a checkpoint as safetensors, in the model's own names."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.export import export_source, parse_bytes, parse_dtype
from ..checkpoint.files import MANIFEST, CheckpointError, folder_path
from ..checkpoint.folder import CheckpointFolder
from .arguments import Parser, size_of

_EXAMPLES = """examples:
  lowtide export runs/gpt weights
  lowtide export runs/gpt weights --tag global_step100 --dtype bf16 --shard-bytes 500MB
  lowtide export runs/gpt/global_step100 weights --ema
"""


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 1, with the reason on standard error, where the export could not be written."""
    arguments = parser().parse_args(argv)
    try:
        checkpoint = open_checkpoint(arguments.checkpoint, arguments.tag)
        if checkpoint.left_out:
            raise ValueError(
                f"{checkpoint.path}: expected all parameters, found {len(checkpoint.left_out)} frozen ones left out "
                "(checkpoint.exclude_frozen_parameters): load it into an engine, which has them, and call engine.export"
            )
        plan = export_source(
            checkpoint.averaged_weights if arguments.ema else checkpoint.weights,
            arguments.folder,
            dtypes=checkpoint.compute_dtypes,
            dtype=arguments.dtype,
            shard_bytes=arguments.shard_bytes,
            model_files=files_for(checkpoint, arguments.dtype),
        )
    except (CheckpointError, OSError, ValueError) as error:
        print(f"lowtide export: {error}", file=sys.stderr)
        return 1
    files = f"{len(plan.files)} files" if len(plan.files) > 1 else "one file"
    print(
        f"{arguments.folder}: {len(plan.places)} tensors of checkpoint {checkpoint.tag}, "
        f"{size_of(plan.total_bytes)} in {files}"
    )
    return 0


def open_checkpoint(path: str, tag: str | None) -> Checkpoint:
    """The checkpoint of that tag, or the latest, in a folder of checkpoints; or the one that the path itself is."""
    folder = folder_path(path)
    if tag is None and (folder / MANIFEST).exists():
        return Checkpoint(folder)
    return CheckpointFolder(folder).open(tag)


def files_for(checkpoint: Checkpoint, dtype: torch.dtype | None) -> dict[str, Any]:
    """The checkpoint's model files; a Hugging Face configuration among them names the dtype that is written."""
    files = dict(checkpoint.model_files)
    own = next((d for d in checkpoint.compute_dtypes.values() if d.is_floating_point), None)
    written = dtype or own
    if isinstance(files.get("config.json"), Mapping) and written is not None:
        name = str(written).removeprefix("torch.")
        files["config.json"] = {"dtype": name, **_with_dtype(files["config.json"], name)}
    return files


def _with_dtype(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The same with every "dtype" replaced, in the configurations of parts of the model too."""
    changed: dict[str, Any] = {}
    for key, value in config.items():
        part = _with_dtype(value, name) if isinstance(value, Mapping) else value
        changed[key] = name if key in ("dtype", "torch_dtype") else part
    return changed


def _dtype(text: str) -> torch.dtype | None:
    try:
        return parse_dtype(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parser() -> Parser:
    """The command line of `lowtide export`."""
    result = Parser.of("export", _EXAMPLES)
    result.add_argument("checkpoint", metavar="CHECKPOINT", help="a folder of checkpoints, or one checkpoint in it")
    result.add_argument("folder", metavar="FOLDER", help="where the files go; what was exported there is replaced")
    result.add_argument("--tag", help="which checkpoint of the folder (default: the latest)")
    result.add_argument(
        "--dtype", type=_dtype, help="fp32, bf16, fp16 or fp64 (default: what each parameter is computed in)"
    )
    result.add_argument("--ema", action="store_true", help="moving averages (engine.ema) in the place of weights")
    size = "size of a file, such as 500MB (default: 5GB)"
    result.add_argument("--shard-bytes", metavar="SIZE", type=_bytes, default="5GB", help=size)
    return result
