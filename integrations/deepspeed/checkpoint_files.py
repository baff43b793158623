"""Read a checkpoint of DeepSpeed 0.10 to 0.19 from its files.

    folder/latest                                          the tag
    folder/TAG/mp_rank_00_model_states.pt                  the module; at stage 0 the optimizer as well
    folder/TAG/zero_pp_rank_R_mp_rank_00_model_states.pt   stage 3: frozen parameters, buffers
    folder/TAG/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   rank R's shard of master weights and states
    folder/TAG/layer_LL-model_states.pt                    a layer of a pipeline
    folder/TAG/zero/NAME/fp32.pt, exp_avg.pt, ...          universal: a parameter's master weight and states

[Note: flat groups] Below stage 3 a group is the concatenation of its parameters (with `parameter_alignment` a gap
behind each), padded at the end and cut into a shard for each rank. At stage 3 each parameter is padded to a multiple of
the ranks and cut into equal rows, and a rank's flat group has its row of each parameter. If a rank's rows of a group
are more than `sub_group_size` elements, it has several flat groups for the group, of whole rows each.

[Note: safe unpickling] The files are pickles. torch's restricted unpickler (`weights_only`) knows tensors and plain
values. An object of any further class becomes an `_Unknown`, and nothing in a file is called.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from ..checkpoint.files import CheckpointError, NoCheckpointError

COUNTERS = "lowtide.deepspeed"
"""Key in the client state of the counters of `DeepSpeedEngine`."""

_STEP = "step"
_OWN_KEYS = frozenset(
    (
        "autoep_layers",
        "buffer_names",
        "checkpoint_parallel_dimensions",
        "data_sampler",
        "dp_world_size",
        "ds_config",
        "ds_version",
        "frozen_param_fragments",
        "frozen_param_shapes",
        "global_samples",
        "global_steps",
        "lr_scheduler",
        "module",
        "mp_size",
        "mp_world_size",
        "num_experts",
        "optimizer",
        "param_shapes",
        "random_ltd",
        "shared_params",
        "skipped_steps",
        "sparse_tensor_module_names",
    )
)
"""Keys that DeepSpeed writes. Any other key belongs to the caller's client state."""


def is_deepspeed_checkpoint(path: Path) -> bool:
    """Return whether a folder has the files of a DeepSpeed checkpoint."""
    return any(path.glob("*mp_rank_*_model_states.pt"))


def read_deepspeed(folder: Path, tag: str | None = None) -> DeepSpeedCheckpoint:
    """Read the checkpoint with this tag, or the latest. `folder` may be the checkpoint itself.

    Raises NoCheckpointError without a checkpoint, CheckpointError if it is damaged, has several model-parallel ranks or
    experts.
    """
    path = _find(folder, tag)
    files = sorted(path.glob("mp_rank_*_model_states.pt"))
    by_rank = _by_number(path.glob("zero_pp_rank_*_model_states.pt"), r"zero_pp_rank_(\d+)_")
    layers = sorted(path.glob("layer_*-model_states.pt"))
    # Of a pipeline only the weights are read. A stage counts as a rank of the model in the names of all other files.
    optimizers = [] if layers else _by_number(path.glob("*zero_pp_rank_*_optim_states.pt"), r"zero_pp_rank_(\d+)_")
    other_ranks = [file for file in (*files, *by_rank, *optimizers) if "mp_rank_00" not in file.name]
    if any(path.glob("layer_*-model_01-*")) if layers else other_ranks:
        raise CheckpointError(
            f"{path}: expected one rank of model parallelism, found several. Merge them with DeepSpeed first"
        )
    if experts := sorted(path.glob("layer_*_expert_*_model_states.pt")):
        raise CheckpointError(
            f"{path}: expected no experts of deepspeed.moe, found {len(experts)} ({experts[0].name}, ...). Collect the "
            "weights under the names of your model, torch.save them as pytorch_model.bin, and import its folder"
        )
    main = load_pickle(files[0] if files else by_rank[0])
    if layers:
        main |= {"module": _of_layers(layers), "optimizer": None, "param_shapes": None}
    if (universal := path / "zero" / "optimizer_state.pt").is_file():
        parts = [{"optimizer_state_dict": load_pickle(universal)}]
    else:
        parts = [load_pickle(file) for file in optimizers]
    ranks = [load_pickle(file) for file in by_rank]
    return _Reader(path, main, parts, ranks).read()


@dataclass(frozen=True)
class DeepSpeedCheckpoint:
    """The content of a checkpoint in host memory, by the model's names."""

    tag: str
    weights: dict[str, Tensor]
    """Buffers, and float32 parameters: master weights if a file has them."""
    compute_dtypes: dict[str, torch.dtype]
    """Of the parameters."""
    aliases: dict[str, str]
    """Further names of tied parameters -> the first."""
    states: dict[str, dict[str, Tensor]]
    """Parameter -> state -> values of its shape."""
    groups: list[dict[str, Any]]
    """Options of the optimizer's groups, without parameters. []: the files do not tell whose states they have."""
    group_names: list[list[str]]
    num_updates: int
    optimizer: Mapping[str, Any]
    """The section of the checkpoint's config."""
    scheduler: dict[str, Any] | None
    loss_scaler: dict[str, Any]
    counters: dict[str, int]
    """Counters of `DeepSpeedEngine`."""
    client_state: dict[str, Any]


class _Reader:
    """Collects weights and states from the content of the files."""

    def __init__(self, path: Path, main: dict[str, Any], parts: Sequence[Any], ranks: Sequence[Any]) -> None:
        """parts: optimizer files by rank. ranks: model files of stage 3 by rank."""
        self._path = path
        self._main = main
        self._module: Mapping[str, Any] = main["module"]
        self._parts = [part["optimizer_state_dict"] for part in parts]
        self._ranks = ranks
        self._config = main["ds_config"] if isinstance(main.get("ds_config"), Mapping) else {}
        self._buffers = frozenset(main.get("buffer_names") or ())
        shared = main.get("shared_params")
        self._aliases = self._ties() if shared is None else {str(alias): str(name) for alias, name in shared.items()}
        self._params = [name for name in self._module if name not in self._buffers and name not in self._aliases]
        self._weights: dict[str, Tensor] = {}
        self._states: dict[str, dict[str, Tensor]] = {}
        self._steps: list[float] = []

    def read(self) -> DeepSpeedCheckpoint:
        main = self._main
        groups, shapes = self._read_optimizer()
        self._read_frozen()
        self._read_module(shapes)
        dtypes = {name: value.dtype for name, value in self._module.items() if isinstance(value, Tensor)}
        params = [name for name in self._weights if name not in self._buffers]
        counters = self._counters()
        # The optimizer counts its updates. Without its count: all steps but the skipped.
        num_updates = max(self._steps, default=counters["global_steps"] - counters["skipped_steps"])
        scheduler = main.get("lr_scheduler")
        return DeepSpeedCheckpoint(
            tag=self._path.name,
            weights=self._weights,
            compute_dtypes={name: dtypes.get(name, torch.float32) for name in params},
            aliases={alias: name for alias, name in self._aliases.items() if name in self._weights},
            states=self._states,
            groups=groups,
            group_names=[list(group) for group in shapes] or [params],
            num_updates=int(num_updates),
            optimizer=self._config.get("optimizer") or {},
            scheduler=dict(scheduler) if isinstance(scheduler, Mapping) else None,
            loss_scaler=self._loss_scaler(),
            counters=counters,
            client_state={str(key): value for key, value in main.items() if key not in _OWN_KEYS},
        )

    def _read_optimizer(self) -> tuple[list[dict[str, Any]], list[Mapping[str, Any]]]:
        """Read master weights and states. Returns the options of each group, and its parameters with their shapes."""
        shapes: list[Mapping[str, Any]] = [dict(group) for group in self._main.get("param_shapes") or ()]
        whole = self._main.get("optimizer")
        if isinstance(whole, Mapping) and len(flats := whole.get("fp32_groups_flat", ())) == 1:
            # Of FusedAdam in float16: a flat group, as of ZeRO on a single rank. The values tell the order in it.
            half = torch.cat([self._module[name].reshape(-1) for name in self._params])
            if torch.equal(half, flats[0].to(half.dtype)):
                base = {"single_partition_of_fp32_groups": flats, "base_optimizer_state": whole["optimizer_state_dict"]}
                self._parts = [{**whole, **base}]
                shapes = [{name: self._module[name].shape for name in self._params}]
        if self._parts and shapes:
            is_universal = (self._path / "zero").is_dir()
            options = self._read_universal(shapes) if is_universal else self._read_parts(shapes)
            # Of the optimizer's parameters, which are flat groups. A group has several if they are sub-groups.
            flats_of = [group["params"] for group in options]
            if sorted(index for indices in flats_of for index in indices) != list(range(len(shapes))):
                return [], shapes
            members = [{n: shape for i in indices for n, shape in shapes[i].items()} for indices in flats_of]
            return [_options(group) for group in options], list(members)
        return self._read_whole(whole) if isinstance(whole, Mapping) else ([], shapes)

    def _read_module(self, shapes: Sequence[Mapping[str, Any]]) -> None:
        """Read buffers, and parameters without master weights. shapes: of the parameters in the optimizer's files."""
        tensors = {name: value for name, value in self._module.items() if isinstance(value, Tensor)}
        of_shapes = {name: shape for group in shapes for name, shape in group.items() if math.prod(shape)}
        # At stage 3 the module's tensors are empty.
        empty = {name for name, value in tensors.items() if not value.numel()}
        if absent := [name for name in of_shapes if name in empty and name not in self._weights]:
            raise CheckpointError(
                f"{self._path}: expected the values of {len(absent)} parameters ('{absent[0]}') in files of the "
                "optimizer, found none"
            )
        for name, value in tensors.items():
            if name not in self._weights and name not in self._aliases and name not in empty:
                is_narrow = value.is_floating_point() and name not in self._buffers
                self._weights[name] = value.float() if is_narrow else value

    def _counters(self) -> dict[str, int]:
        found = {key: int(self._main.get(key) or 0) for key in ("global_steps", "global_samples", "skipped_steps")}
        accumulation = self._config.get("gradient_accumulation_steps")
        return {**found, "micro_steps": found["global_steps"] * (accumulation if isinstance(accumulation, int) else 1)}

    def _loss_scaler(self) -> dict[str, Any]:
        """Return the state of float16's loss scaler."""
        of = self._parts[0] if self._parts else self._main.get("optimizer") or {}
        found = vars(of["loss_scaler"]) if isinstance(of.get("loss_scaler"), _Unknown) else of  # stage 0 has no object
        # DeepSpeed raises the scale in the step after this count is a multiple of the window, lowtide in the step that
        # makes it a multiple.
        since = int(found.get("cur_iter", 0)) - int(found.get("last_overflow_iter", -1)) - 1
        return {
            "is_dynamic": bool(of.get("dynamic_loss_scale", False)),
            "scale": float(found.get("cur_scale", 1.0)),
            "overflows_left": int(found.get("cur_hysteresis", 1)),
            "steps_without_overflow": max(0, since - 1) % max(1, int(found.get("scale_window", 1000))),
        }

    def _read_whole(self, optimizer: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[Mapping[str, Any]]]:
        """Read stage 0: torch's state dict by parameter index, in half precision nested beside master weights.

        Returns no groups if the shapes do not tell the parameter of each index.
        """
        inner = optimizer.get("optimizer_state_dict", optimizer)
        names = self._names_by_index(inner)
        if not names:
            return [], []  # frozen parameters, several flat groups, or similar groups: only the weights can be read
        masters = [master for group in optimizer.get("fp32_groups", ()) for master in group]
        self._weights |= {names[index]: master for index, master in enumerate(masters)}
        for index, state in inner["state"].items():
            self._add_states(names[index], state, tuple(self._module[names[index]].shape))
        groups = [_options(group) for group in inner["param_groups"]]
        shapes = [{names[i]: self._module[names[i]].shape for i in group["params"]} for group in inner["param_groups"]]
        return groups, list(shapes)

    def _names_by_index(self, inner: Mapping[str, Any]) -> dict[int, str]:
        """Return the parameter of each index. {}: the shapes of the states leave a choice, or fit no parameter.

        Indices count through the groups, and a group has its parameters in the model's order.
        """
        left = [list(group["params"]) for group in inner["param_groups"]]
        found: dict[int, str] = {}
        for name in self._params:
            fitting = [group for group in left if group and self._may_be(name, inner["state"].get(group[0], {}))]
            if len(fitting) != 1:
                return {}
            found[fitting[0].pop(0)] = name
        return {} if any(left) else found

    def _may_be(self, name: str, state: Mapping[str, Any]) -> bool:
        shapes = [value.shape for key, value in state.items() if key != _STEP and isinstance(value, Tensor)]
        return not shapes or self._module[name].shape in shapes

    def _ties(self) -> dict[str, str]:
        """Return the further names of tied parameters -> the first. Stage 0 does not list them."""
        found: dict[str, str] = {}
        first: dict[object, str] = {}
        for name, value in self._module.items():
            if isinstance(value, Tensor) and value.numel() and name not in self._buffers:
                place = value.data_ptr(), value.shape, value.stride()
                if first.setdefault(place, name) != name:
                    found[name] = first[place]
        return found

    def _add_states(self, name: str, state: Mapping[str, Any], shape: tuple[int, ...]) -> None:
        for key, value in state.items():
            if key == _STEP:
                self._steps.append(float(value))
            elif isinstance(value, Tensor) and tuple(value.shape) == shape:
                self._states.setdefault(name, {})[key] = value.float()

    def _read_parts(self, shapes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Read master weights and states from the shards of all ranks: see [Note: flat groups]. Returns the options."""
        first = self._parts[0]
        is_stage_3 = "fp32_flat_groups" in first
        masters = [
            part["fp32_flat_groups" if is_stage_3 else "single_partition_of_fp32_groups"] for part in self._parts
        ]
        bases = [part["optimizer_state_dict" if is_stage_3 else "base_optimizer_state"] for part in self._parts]
        all_gaps = first.get("param_alignment_paddings")
        if (fewest := min(map(len, masters))) < len(shapes):
            raise CheckpointError(f"{self._path}: expected {len(shapes)} flat groups on each rank, found {fewest}")
        for index, group in enumerate(shapes):
            members = list(zip(group, group.values(), all_gaps[index] if all_gaps else [0] * len(group), strict=True))
            self._join([master[index] for master in masters], members, self._weights, is_stage_3)
            states = [base["state"].get(index, {}) if isinstance(base, Mapping) else base[index] for base in bases]
            for key, value in states[0].items():
                if key == _STEP:
                    self._steps.append(float(value))
                # A state of the shard's size belongs to its elements. A scalar belongs to no parameter.
                elif isinstance(value, Tensor) and value.numel() == masters[0][index].numel():
                    whole: dict[str, Tensor] = {}
                    self._join([state[key] for state in states], members, whole, is_stage_3)
                    for name, values in whole.items():
                        self._states.setdefault(name, {})[key] = values
        return bases[0]["param_groups"] if isinstance(bases[0], Mapping) else []

    def _read_universal(self, shapes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Read master weights and states of a universal checkpoint: a file for each. Returns the options."""
        for name, shape in (item for group in shapes for item in group.items()):
            for file in (self._path / "zero" / name).glob("*.pt"):
                found = load_pickle(file, (dict, Tensor))
                value = found["param"] if isinstance(found, dict) else found
                # Of stage 3 it is flat, and may be padded.
                whole = value.reshape(-1)[: math.prod(shape)].view(tuple(shape)) if value.dim() else value
                if file.stem == "fp32":
                    self._weights[name] = whole.float()
                else:
                    self._add_states(name, {file.stem: whole}, tuple(shape))
        return list(self._parts[0].get("param_groups", ()))

    def _join(self, parts: Sequence[Tensor], members: Sequence[Any], out: dict[str, Tensor], is_stage_3: bool) -> None:
        """Add each of the members, (name, shape, elements behind it), of a flat group to `out`. parts: by rank."""
        flats = [part.reshape(-1).float() for part in parts]
        if not is_stage_3:
            flats = [torch.cat(flats)]  # of whole parameters
        offset = 0
        for name, shape, gap in members:
            row = _row(shape, len(flats))
            if offset + row > flats[0].numel():
                each = " on each rank" if is_stage_3 else ""
                raise CheckpointError(
                    f"{self._path}: expected {offset + row} elements{each} for '{name}', found {flats[0].numel()}"
                )
            whole = torch.cat([flat[offset : offset + row] for flat in flats])
            # Copied, or each parameter would keep its padding in memory.
            out[name] = whole[: math.prod(shape)].view(tuple(shape)).clone()
            offset += row + gap

    def _read_frozen(self) -> None:
        """Read frozen parameters (without master weights): whole, or at stage 3 a row on each rank."""
        shapes = dict(self._main.get("frozen_param_shapes") or {})
        chunk_views = [dict(rank.get("frozen_param_fragments") or {}) for rank in self._ranks or [self._main]]
        for name, shape in shapes.items():
            whole = torch.cat([chunk_view[name].reshape(-1) for chunk_view in chunk_views])
            self._weights[name] = whole[: math.prod(shape)].view(tuple(shape)).float()


def _of_layers(files: Sequence[Path]) -> dict[str, Any]:
    """Read a pipeline's layers, with the layer's number before each name."""
    found: dict[str, Any] = {}
    for file in files:
        number = re.match(r"layer_(\d+)", file.name)
        assert number is not None
        found |= {f"{int(number[1])}.{name}": value for name, value in load_pickle(file).items()}
    return found


def _row(shape: Sequence[int], num_ranks: int) -> int:
    """Return the number of elements of a parameter on each rank at stage 3."""
    return -(-math.prod(shape) // num_ranks)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _find(folder: Path, tag: str | None) -> Path:
    if tag is None and is_deepspeed_checkpoint(folder):
        return folder
    latest = folder / "latest"
    name = tag if tag is not None else latest.read_text(encoding="utf-8").strip() if latest.is_file() else None
    if name is None or "/" in name or not is_deepspeed_checkpoint(folder / name):
        found = sorted(path.name for path in folder.iterdir() if path.is_dir() and is_deepspeed_checkpoint(path))
        raise NoCheckpointError(
            f"{folder}: expected a DeepSpeed checkpoint{f' with the tag {name!r}' if name else ''}, found "
            + (f"{', '.join(found)}. Choose one by --tag" if found else "no folder with *mp_rank_*_model_states.pt")
        )
    return folder / name


def _by_number(paths: Any, pattern: str) -> list[Path]:
    def number(path: Path) -> int:
        found = re.search(pattern, path.name)
        return int(found[1]) if found is not None else -1

    return sorted(paths, key=number)


# -- pickles ----------------------------------------------------------------------------------------------------------


class _Unknown(SimpleNamespace):
    """An object of an unknown class: the attributes in the file, without behaviour."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def __call__(self, *args: Any, **kwargs: Any) -> _Unknown:
        return _Unknown()

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update({str(key): value for key, value in state.items()})


def load_pickle(path: Path, kinds: tuple[type, ...] = (dict,)) -> Any:
    """Read a file of torch.save: see [Note: safe unpickling]. Raises CheckpointError, also for another kind."""
    try:
        with safe_globals([defaultdict]):
            # Named before loading: `_Unknown` replaces each of these classes, so no code of the file runs.
            unknown = get_unsafe_globals_in_checkpoint(path)
            with safe_globals([(_Unknown, name) for name in unknown]):
                found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds of errors for a foreign file
        raise CheckpointError(f"{path}: expected a file written by torch.save; {error}") from error
    if not isinstance(found, kinds):
        raise CheckpointError(f"{path}: expected a dictionary, found {type(found).__name__}")
    return _detached(found)


def _detached(value: Any) -> Any:
    """Replace parameters by plain tensors."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: _detached(item) for key, item in value.items()}
    return [_detached(item) for item in value] if type(value) is list else value
