"""`lowtide export`: write the weights of a checkpoint as safetensors, with the model's parameter names."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.export import DTYPES, export_source, parse_bytes, parse_dtype
from ..checkpoint.files import MANIFEST, CheckpointError, folder_path
from ..checkpoint.folder import CheckpointFolder
from .arguments import Parser, argument, reports, size_of

_EXAMPLES = """examples:
  lowtide export runs/gpt weights
  lowtide export runs/gpt weights --tag global_step100 --dtype bf16 --shard-bytes 500MB
  lowtide export runs/gpt/global_step100 weights --ema
"""


@reports("export", CheckpointError, OSError, ValueError)
def main(argv: Sequence[str]) -> int:
    """Run the command. Return 1, with the reason on stderr, if the export failed."""
    arguments = parser().parse_args(argv)
    checkpoint, dtype = open_checkpoint(arguments.checkpoint, arguments.tag), parse_dtype(arguments.dtype)
    if left_out := checkpoint.manifest.left_out:
        raise ValueError(
            f"{checkpoint.path}: expected all parameters, but the checkpoint lacks {len(left_out)} "
            "frozen parameters (checkpoint.exclude_frozen_parameters); load it into an engine, call engine.export"
        )
    plan = export_source(
        checkpoint.averaged_weights if arguments.ema else checkpoint.weights,
        arguments.folder,
        dtypes=checkpoint.manifest.compute_dtypes,
        dtype=dtype,
        shard_bytes=arguments.shard_bytes,
        model_files=files_for(checkpoint, dtype),
    )
    files = f"{len(plan.files)} files" if len(plan.files) > 1 else "1 file"
    print(
        f"{arguments.folder}: {len(plan.places)} tensors of checkpoint {checkpoint.manifest.tag}, "
        f"{size_of(plan.total_bytes)} in {files}"
    )
    return 0


def open_checkpoint(path: str, tag: str | None) -> Checkpoint:
    """Open the checkpoint at `path`, or in this folder the checkpoint `tag`, by default the latest."""
    folder = folder_path(path)
    if tag is None and (folder / MANIFEST).exists():
        return Checkpoint(folder)
    return CheckpointFolder(folder).open(tag)


def files_for(checkpoint: Checkpoint, dtype: torch.dtype | None) -> dict[str, Any]:
    """Return the checkpoint's model files. A Hugging Face config.json gets the dtype of the exported weights."""
    files = dict(checkpoint.manifest.model_files)
    written = dtype or next((d for d in checkpoint.manifest.compute_dtypes.values() if d.is_floating_point), None)
    if isinstance(files.get("config.json"), Mapping) and written is not None:
        name = str(written).removeprefix("torch.")
        files["config.json"] = {"dtype": name, **_with_dtype(files["config.json"], name)}
    return files


def _with_dtype(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a copy with every "dtype" replaced, also in nested configs."""
    changed: dict[str, Any] = {}
    for key, value in config.items():
        part = _with_dtype(value, name) if isinstance(value, Mapping) else value
        changed[key] = name if key in ("dtype", "torch_dtype") else part
    return changed


def parser() -> Parser:
    """Return the command line of `lowtide export`."""
    result = Parser.of("export", _EXAMPLES)
    result.add_argument("checkpoint", metavar="CHECKPOINT", help="a folder of checkpoints, or a checkpoint in it")
    result.add_argument("folder", metavar="FOLDER", help="output folder; an earlier export in it is replaced")
    result.add_argument("--tag", help="the checkpoint's tag (default: the latest)")
    dtype = "of floating-point tensors (default: each parameter's compute dtype)"
    result.add_argument("--dtype", choices=DTYPES, help=dtype)
    result.add_argument("--ema", action="store_true", help="export the moving averages (engine.ema)")
    size = "largest size of a file, for example 500MB (default: 5GB)"
    result.add_argument("--shard-bytes", metavar="SIZE", type=argument(parse_bytes), default="5GB", help=size)
    return result
