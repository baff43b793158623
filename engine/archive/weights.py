"""Plain weights: a model's tensors from its shards to safetensors files and back, without gathering."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.chunk_view import ChunkView, TensorInfo, TensorSource
from ...checkpoint.export import DEFAULT_SHARD_BYTES, ExportFolder, exported_infos, parse_bytes, parse_dtype, progress
from ...checkpoint.files import LATEST, MANIFEST, folder_path
from ...checkpoint.folder import CheckpointFolder
from ...checkpoint.safetensors_files import SafetensorsSource, WeightsPlan
from ...comm import World
from ...watch.log import logger
from .adapters import FILE, MergedModel, adapter_files, merged
from .agreement import all_or_none, display_path, no_rank_alone
from .full_values import FullValues
from .named_state import NamedState, is_extra_state


def export(
    state: NamedState,
    folder: str | os.PathLike[str],
    dtype: str | torch.dtype | None = None,
    shard_bytes: int | str = DEFAULT_SHARD_BYTES,
) -> None:
    """Write the module's parameters and persistent buffers to `folder` as safetensors, under the module's names.

    Every rank writes its shards into files that all ranks see. A collective; an error of a rank is raised on all, and
    leaves an earlier export in the folder unchanged. See `Engine.export`.
    """
    infos = exported_infos(_tensors_of(state), parse_dtype(dtype), state.catalog.compute_dtypes)
    plan = WeightsPlan.of(infos, parse_bytes(shard_bytes))
    files = partial(model_files, state.module, _dtype_of_weights(infos, state))
    _export(state.mesh.world, folder, plan, files, lambda target: _write(target, plan, state, parse_dtype(dtype)))


def export_adapters(
    state: NamedState,
    folder: str | os.PathLike[str],
    dtype: str | torch.dtype | None = None,
    shard_bytes: int | str = DEFAULT_SHARD_BYTES,
) -> None:
    """Write the adapters alone, as `PeftModel.from_pretrained` reads them. See `export`, `Engine.export`."""
    if shard_bytes != DEFAULT_SHARD_BYTES:
        raise ValueError(
            f"engine.export(adapters_only=True): expected no shard_bytes, found {shard_bytes!r}, since PEFT reads "
            "a single file; leave it out"
        )
    wanted = parse_dtype(dtype)
    tensors = exported_infos(_tensors_of(state), wanted, state.catalog.compute_dtypes)
    world = state.mesh.world
    with no_rank_alone(world, "engine.export()"):
        files = adapter_files(state)
    with all_or_none(world, f"export to {display_path(folder)}"):
        place = folder_path(folder)
    for file in files:
        plan = WeightsPlan.of_one(FILE, {new: tensors[name] for new, name in file.names.items()})
        write = partial(_write, plan=plan, state=state, dtype=wanted, names=file.names)
        _export(world, place / file.folder, plan, partial(dict, file.model_files), write)


def export_merged(
    state: NamedState,
    values: FullValues,
    folder: str | os.PathLike[str],
    dtype: str | torch.dtype | None = None,
    shard_bytes: int | str = DEFAULT_SHARD_BYTES,
) -> None:
    """Write the base model with the adapters merged into its weights. See `export`, `Engine.export`.

    Each rank gathers a unit at a time, with the adapted layers that reach into other units, and merges private copies.
    """
    # parallel.tensor needs no check: A or B is split like the weight, so each rank merges its part.
    split = [name for name in ("pipe", "expert") if state.mesh.axes[name].size > 1]
    if split:
        raise ValueError(
            f"engine.export(merged=True): expected ranks with whole layers, found layers split by parallel."
            f"{'pipeline' if split[0] == 'pipe' else split[0]}; export adapters_only, and merge in a single process"
        )
    world = state.mesh.world
    with no_rank_alone(world, "engine.export()"):
        model = MergedModel(state)
    tensors = exported_infos(_tensors_of(state), parse_dtype(dtype), state.catalog.compute_dtypes)
    infos = {model.names[name]: info for name, info in tensors.items() if name in model.names}
    plan = WeightsPlan.of(infos, parse_bytes(shard_bytes))

    def write(target: ExportFolder) -> None:
        failed: Exception | None = None
        with progress(plan.total_bytes, world.rank == 0) as advance:
            for unit in state.units:
                own = {name for group in unit.groups for name in group.layout.names}
                layers = model.layers_of(own)
                params = [param for group in unit.groups for param in group.params]
                with values.copied([*params, *(param for layer in layers for param in layer.parameters())]):
                    try:
                        if failed is None:
                            with torch.no_grad(), merged(layers):
                                target.write(_named(state.full_parts(unit), model.names), advance)
                    # This rank writes no more, but goes on with the gathers, for which the other ranks need it.
                    except Exception as error:
                        failed = error
            if failed is not None:
                raise failed
            if state.holds_buffers:
                buffers = [_whole(name, buffer) for name, buffer in state.buffers().items()]
                target.write(_named(buffers, model.names), advance)

    _export(world, folder, plan, partial(model_files, model.module, _dtype_of_weights(tensors, state)), write)


def _export(
    world: World,
    folder: str | os.PathLike[str],
    plan: WeightsPlan,
    files: Callable[[], Mapping[str, Any]],
    write: Callable[[ExportFolder], None],
) -> None:
    """Write a folder that appears complete or not at all.

    files: returns the content of the other files, on rank 0. write: writes this rank's part of the tensors.
    """
    what = f"export to {display_path(folder)}"
    hint = f"Nothing else in {display_path(folder)} has changed"
    is_first = world.rank == 0
    with all_or_none(world, what):
        target = ExportFolder(folder, plan)
    try:
        with all_or_none(world, what, f"{hint}."):
            if is_first:
                target.create(files())
        with all_or_none(world, what, f"{hint}. Every rank writes to the folder, and must see the same one."):
            write(target)
        with all_or_none(world, what):
            if is_first:
                # In a separate block: rank 0 replaces the earlier export only after all ranks have written.
                target.publish()
    except BaseException:
        if is_first:
            target.discard()
        raise


def load_weights(state: NamedState, path: str | os.PathLike[str], strict: bool = True) -> Collection[str]:
    """Load the tensors of safetensors files, or of a checkpoint, into shards, master weights and buffers.

    Returns the names of loaded tensors. Each rank reads the ranges of its shards, and all buffers. A collective. See
    `Engine.load_weights`.
    """
    world, what = state.mesh.world, f"load_weights from {display_path(path)}"
    with all_or_none(world, what, "Nothing was loaded."):
        source = open_source(path)
        buffers = state.buffers()
        expected = {**state.catalog.parameters, **state.catalog.buffers}
        match = Match.of(expected, state.catalog.aliases, source.tensors)
    match.check(world, strict, what)
    with all_or_none(world, what, "The weights are in part those of before: load again."):
        named = {name: buffer for name, buffer in buffers.items() if name in match.sources}
        wholes = [_whole(name, buffer) for name, buffer in named.items()]
        own = [chunk_view for chunk_view in state.weights(changes=True) if chunk_view.name in match.sources]
        source.read([replace(chunk_view, name=match.sources[chunk_view.name]) for chunk_view in [*own, *wholes]])
        # `_whole` has copied a buffer that is not contiguous, and `read` has filled the copy.
        for buffer, whole in zip(named.values(), wholes, strict=True):
            if not buffer.is_contiguous():
                buffer.detach().copy_(whole.values.view(buffer.shape))
    state.publish()
    return match.sources


def load_state_dict(
    state: NamedState, values: FullValues, given: Mapping[str, Any], strict: bool = True
) -> Collection[str]:
    """Load rank 0's tensors into shards, master weights and buffers, and return their names. A collective.

    See `Engine.load_state_dict`.
    """
    world, what = state.mesh.world, "engine.load_state_dict()"
    with no_rank_alone(world, what):
        own = {name: TensorInfo(tuple(v.shape), v.dtype) for name, v in given.items() if isinstance(v, Tensor)}
    found = world.broadcast_object(own)
    expected = {**state.catalog.parameters, **state.catalog.buffers}
    match = Match.of(expected, state.catalog.aliases, found)
    match.check(world, strict, what, " on rank 0")
    buffers = state.buffers()
    with torch.no_grad():
        for name, source in match.sources.items():
            info = expected[name]
            # Only rank 0 has values. The other ranks give memory of the same shape and dtype, as a broadcast needs.
            whole = given[source].detach() if world.rank == 0 else torch.empty(info.shape)
            value = world.broadcast_tensor(whole.to(info.dtype))
            if name in buffers:
                buffers[name].copy_(value)
            else:
                values.write_named(name, value)
    state.publish()
    return match.sources


def open_source(path: str | os.PathLike[str]) -> TensorSource:
    """Open the weights at a path: a checkpoint, a folder with a latest checkpoint, or safetensors.

    Raises OSError, ValueError and CheckpointError.
    """
    folder = folder_path(path)
    # A folder with a manifest is a checkpoint. A folder with `latest` has several.
    if (folder / MANIFEST).exists():
        return Checkpoint(folder).weights
    if (folder / LATEST).exists():
        return CheckpointFolder(path).open().weights
    return SafetensorsSource(path)


def model_files(module: nn.Module, dtype: torch.dtype | None) -> dict[str, Any]:
    """Return the JSON files that Hugging Face's `from_pretrained` needs beside the weights: file name -> content.

    Empty without a Hugging Face configuration. dtype: of the weights, for the configuration.
    """
    config: Any = getattr(module, "config", None)
    generation: Any = getattr(module, "generation_config", None)
    if not callable(getattr(config, "save_pretrained", None)):
        return {}
    try:
        config = copy.deepcopy(config)
        parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
        for one in [config, *(part for part in parts if part is not None)]:
            # transformers has renamed the field.
            setattr(one, "dtype" if hasattr(one, "dtype") else "torch_dtype", dtype)
        config.architectures = [type(module).__name__]
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            if callable(getattr(generation, "save_pretrained", None)):
                generation.save_pretrained(folder)
            return {path.name: json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))}
    except Exception as error:  # third-party code may raise anything
        raise ValueError(f"the model's configuration ({type(config).__name__}) could not be saved: {error}") from error


# -- the tensors of a model and of a source -------------------------------------------------------------------------


@dataclass
class Match:
    """The model's tensors compared with those of a source."""

    sources: dict[str, str] = field(default_factory=dict)  # name in the model -> name in the source
    missing: list[str] = field(default_factory=list)  # a line each
    extra: list[str] = field(default_factory=list)
    misshaped: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls, expected: Mapping[str, TensorInfo], aliases: Mapping[str, str], found: Mapping[str, TensorInfo]
    ) -> Match:
        """Compare. expected: every tensor by first name. aliases: further names of tied tensors -> first name."""
        match = cls()
        names: dict[str, list[str]] = {name: [name] for name in expected}
        for alias, first in aliases.items():
            names[first].append(alias)
        for first, info in expected.items():
            # A file may have a tied tensor under any of its names, or under all. The form of each is compared, and the
            # first is loaded.
            present = [name for name in names[first] if name in found]
            if not present:
                match.missing.append(f"{' = '.join(names[first])}: expected {_describe(info)}")
                continue
            match.sources[first] = present[0]
            match.misshaped += [
                f"{name}: expected {_describe(info)}, found {_describe(found[name])}"
                for name in present
                if found[name].shape != info.shape or kind_of(found[name].dtype) != kind_of(info.dtype)
            ]
        extra = [name for name in found if not (name in expected or name in aliases or is_extra_state(name))]
        match.extra = [f"{name}: found {_describe(found[name])}" for name in extra]
        return match

    def check(self, world: World, strict: bool, what: str, where: str = "") -> None:
        """Raise ValueError on every rank if the tensors of any rank do not fit. A collective.

        strict: False accepts missing and extra tensors, with a warning.
        """
        is_complete = not (self.missing or self.extra or self.misshaped)
        fits = is_complete or not (strict or self.misshaped)
        faults = [text for text in world.gather_objects(None if fits else self.describe()) if text is not None]
        if faults:
            advice = "" if self.misshaped else " strict=False loads what is in both."
            raise ValueError(
                f"{what}: expected the model's tensors{where}, found {faults[0]}\nNothing was loaded.{advice}"
            )
        if world.rank == 0 and not is_complete:
            logger.warning("%s: found %s", what, self.describe())

    def describe(self) -> str:
        """Count the missing, extra and misshaped tensors, then list each on a line."""
        parts = {"missing": self.missing, "extra": self.extra, "misshaped": self.misshaped}
        counts = ", ".join(f"{len(lines)} {name}" for name, lines in parts.items() if lines)
        return "\n".join([counts, *(f"  {name} {line}" for name, lines in parts.items() for line in lines)])


def _describe(info: TensorInfo) -> str:
    return f"{info.shape} {str(info.dtype).removeprefix('torch.')}"


def kind_of(dtype: torch.dtype) -> str:
    """Return the kind of numbers. Values are cast within a kind; another kind means a wrong file."""
    return "float" if dtype.is_floating_point else "bool" if dtype == torch.bool else "int"


# -- pieces of the functions above ----------------------------------------------------------------------------------


def _write(
    target: ExportFolder,
    plan: WeightsPlan,
    state: NamedState,
    dtype: torch.dtype | None,
    names: Mapping[str, str] | None = None,
) -> None:
    """Write this rank's part of all files, in file order; a rank of each stage writes its buffers.

    names: name in the files -> name of the tensor; None: all tensors, under their names.
    """
    chunk_views = state.weights(rounded=dtype is None, saves=True)
    if state.holds_buffers:
        chunk_views += [_whole(name, buffer) for name, buffer in state.buffers().items()]
    if names is not None:
        views: defaultdict[str, list[ChunkView]] = defaultdict(list)
        for one in chunk_views:
            views[one.name].append(one)
        chunk_views = [replace(one, name=new) for new, name in names.items() for one in views[name]]
    places = plan.places
    # In file order, so that each file is written from front to back.
    chunk_views.sort(key=lambda one: (places[one.name].file, places[one.name].offset, one.start))
    own_bytes = sum(one.numel * places[one.name].info.dtype.itemsize for one in chunk_views)
    with progress(own_bytes, state.mesh.world.rank == 0) as advance:
        target.write(chunk_views, advance)


def _dtype_of_weights(infos: Mapping[str, TensorInfo], state: NamedState) -> torch.dtype | None:
    return first_floating(info.dtype for name, info in infos.items() if name in state.catalog.parameters)


def first_floating(dtypes: Iterable[torch.dtype]) -> torch.dtype | None:
    """Return the first floating-point dtype, of parameters: a Hugging Face configuration names a single dtype."""
    return next((dtype for dtype in dtypes if dtype.is_floating_point), None)


def _tensors_of(state: NamedState) -> dict[str, TensorInfo]:
    """Return parameters (tied: once) and persistent buffers, in the order of the module's state_dict."""
    infos = {**state.catalog.parameters, **state.catalog.buffers}
    order = [name for name in state.whole.names if name in infos]
    return {name: infos[name] for name in dict.fromkeys([*order, *infos])}


def _named(chunk_views: Iterable[ChunkView], names: Mapping[str, str]) -> list[ChunkView]:
    """Keep the tensors that have a name in the files, and rename them."""
    return [replace(one, name=names[one.name]) for one in chunk_views if one.name in names]


def _whole(name: str, tensor: Tensor) -> ChunkView:
    """Return all of a tensor: its memory if it is contiguous, else a copy."""
    return ChunkView(name, tuple(tensor.shape), 0, tensor.detach().reshape(-1))
