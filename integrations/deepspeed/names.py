"""Find DeepSpeed's modules and names: those that exist here, and why the rest do not.

The finder resolves `lowtide.deepspeed.X.Y` for every module of DeepSpeed that `names.txt` lists. A name has the same
meaning in all modules, so a module also has names that another module defines. A missing name is a stand-in, so that a
script may import it without using it: nothing is an instance of it, and calling or subclassing it raises
NotImplementedError with the reason. Names that end in Error or Exception are exceptions: scripts may catch them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

_ROOT = __name__.rpartition(".")[0]

_IN_FILES = {  # file: the names in it; "" for the package
    "": "version git_hash git_branch",
    "accelerator": "get_accelerator",
    "start": "add_config_arguments initialize",
    "operations": "__compatible_ops__ __installed_ops__ compatible_ops installed_ops "
    "FusedAdam DeepSpeedCPUAdam DeepSpeedCPUAdagrad FusedLion DeepSpeedCPULion",
    "checkpointing": "checkpoint configure is_configured reset model_parallel_cuda_manual_seed "
    "model_parallel_reconfigure_tp_seed "
    "get_cuda_rng_tracker non_reentrant_checkpoint CudaRNGStatesTracker set_num_layers "
    "partition_activations_in_checkpoint",
    "comm": "dist init_distributed TORCH_DISTRIBUTED_DEFAULT_PORT",
    "config": "DeepSpeedConfig",
    "config_objects": "DeepSpeedZeroConfig DeepSpeedZeroOffloadParamConfig DeepSpeedZeroOffloadOptimizerConfig "
    "DeepSpeedFP16Config DeepSpeedBF16Config ZeroStageEnum compute_elastic_config elasticity_enabled ElasticityError "
    "ElasticityConfigError ElasticityIncompatibleWorldSize HfDeepSpeedConfig",
    "dataloader": "DeepSpeedDataLoader RepeatingLoader",
    "engine": "DeepSpeedEngine DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable",
    "messages": "DeepSpeedConfigError logger log_dist log_dist_once print_dist print_rank_0 "
    "warning_once "
    "set_log_level_from_string see_memory_usage set_random_seed instrument_w_nvtx",
    "parameters": "is_moe_param has_moe_layers split_params_into_different_moe_groups_for_optimizer "
    "GatheredParameters "
    "register_external_parameter unregister_external_parameter ZeroParamType OffloadDeviceEnum is_zero_param "
    "unwrap_model_for_generation safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state "
    "safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state safe_get_local_fp32_param "
    "safe_get_local_grad safe_get_local_optimizer_state safe_set_local_fp32_param safe_set_local_grad "
    "safe_set_local_optimizer_state safe_update_full_grad_vectorized set_z3_leaf_modules unset_z3_leaf_modules "
    "set_z3_leaf_module get_z3_leaf_modules set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix "
    "z3_leaf_module z3_leaf_parameter",
    "topology": "get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size "
    "get_model_parallel_group "
    "get_model_parallel_rank get_model_parallel_world_size get_tensor_model_parallel_group "
    "get_tensor_model_parallel_rank get_tensor_model_parallel_world_size ProcessTopology PipeDataParallelTopology "
    "PipeModelDataParallelTopology PipelineParallelGrid",
    "layers": "PipelineModule LayerSpec TiedLayerSpec PipelineError",
    "optimizer_view": "OffloadStateTypeEnum DeepSpeedOptimizer",
    "lr_schedules": "WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest VALID_LR_SCHEDULES",
    "owners": "ZeroParamStatus",
    "monitors": "Monitor MonitorMaster TensorBoardMonitor WandbMonitor csvMonitor",
    "divided": "Init",
    "pipeline": "PipelineEngine",
    "small": "OnDevice required_torch_version clip_grad_norm_ recursive_getattr recursive_setattr "
    "clone_tensors_for_torch_save call_to_str",
    "fp32_weights": "get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint "
    "convert_zero_checkpoint_to_fp32_state_dict",
}
HOMES = {name: file for file, names in _IN_FILES.items() for name in names.split()}  # name -> file; "" for the package
_ALIASES = {"zero": "runtime.zero", "checkpointing": "runtime.activation_checkpointing.checkpointing"}

REASONS = {
    "": "it is part of DeepSpeed's internals, which lowtide does not have",
    "accelerator": "torch.accelerator and torch.get_device_module know the device; get_accelerator() is here",
    "add_tuning_arguments": "set the scheduler in the config; it adds no arguments to a parser",
    "MiCS_Init": "use zero.Init",
    "nebula": "checkpoint.async of the config writes in the background",
    "autotuning": "use `lowtide tune CONFIG SCRIPT`",
    "checkpoint": "every checkpoint of lowtide loads at every number of ranks and every stage; "
    "`lowtide checkpoint import` reads DeepSpeed's",
    "comm": "the collectives are those of torch.distributed",
    "compile": "use torch.compile",
    "comm.comm.configure": "use engine.lowtide.profile() or torch.profiler to see the collectives",
    "comm.configure": "use engine.lowtide.profile() or torch.profiler to see the collectives",
    "comm.log_summary": "use engine.lowtide.profile() or torch.profiler to see the collectives",
    "compression": "quantize or prune the model in your script",
    "constants": "it is a constant of DeepSpeed's own files",
    "datastates": "checkpoint.async of the config writes in the background",
    "inference": "lowtide trains; serve what engine.lowtide.export writes with an inference server",
    "init_inference": "lowtide trains; serve what engine.lowtide.export writes with an inference server",
    "DeepSpeedHybridEngine": "lowtide trains; generate by engine.module.generate inside of zero.GatheredParameters",
    "io": "files are read and written by the engine itself (aio in the config)",
    "launcher": "use `lowtide launch`, torchrun or srun",
    "linear.context_manager.Init": "use peft for LoRA; frozen weights take no optimizer states",
    "linear": "use peft for LoRA; frozen weights take no optimizer states",
    "model_implementations": "lowtide runs the model as it is",
    "module_inject": "set parallel.tensor in the config; tensor_parallel.plan for models of other names",
    "tp_model_init": "set parallel.tensor in the config; tensor_parallel.plan for models of other names",
    "set_autotp_mode": "set parallel.tensor in the config",
    "moe": "set parallel.expert in the config; experts of the model's own are divided",
    "monitor": "set the monitors' sections in the config",
    "nvme": "`lowtide env --measure --folder DIR` measures what offloading depends on",
    "ops": "kernels are chosen by the engine (kernels in the config)",
    "ops.lamb": 'an optimizer over whole tensors is named in the config: type "Lamb"',
    "ops.transformer": "use the model's own layers; kernels.fuse_modules of the config fuses them",
    "profiling": "use torch.profiler",
    "runtime.compiler": "use torch.compile",
    "runtime.config": "it is a constant of DeepSpeed's own files; lowtide.Config says what is understood",
    "runtime.constants": "it is a constant of DeepSpeed's own files",
    "runtime.data_pipeline": "sample the data in your script",
    "runtime.fp16.onebit": '1-bit Adam is named in the config: type "OneBitAdam"; there is no 0/1 Adam or 1-bit LAMB',
    "runtime.progressive_layer_drop": "drop layers in your model; skipped blocks work at every stage",
    "runtime.pipe.dualpipev": 'set pipeline.schedule in the config ("zb-v", ...)',
    "runtime.pipe.schedule": "schedules are named by pipeline.schedule in the config; `lowtide schedule` draws them",
    "runtime.swap_tensor": "offloading is set in the config",
    "runtime.zenflow": 'set offload_optimizer.overlap "delayed" in the config',
    "runtime.zero": "it is part of DeepSpeed's ZeRO internals, which lowtide does not have",
    "runtime.zero.mics": "set zero_hpz_partition_size in the config, or parallel",
    "runtime.zero.muon": 'Muon is named in the config: type "Muon"',
    "runtime.zero.tiling": "set tiles in the config",
    "sequence": "set parallel.sequence in the config",
    "utils.groups.initialize": "set parallel in the config",
    "utils.timer": "use torch.profiler",
}
"""Why a name does not exist here, by the name itself or by the longest prefix of its module."""


@cache
def _refused_trees() -> tuple[str, ...]:
    """Return the modules whose names and submodules names.txt does not list: the line that starts with "!"."""
    lines = (Path(__file__).parent / "names.txt").read_text(encoding="utf-8").splitlines()
    return tuple(next(line for line in lines if line.startswith("!")).split()[1:])


@cache
def _table() -> dict[str, dict[str, str]]:
    """Read names.txt: module ("." for the package) -> public name -> the string it stands for, or ""."""
    found: dict[str, dict[str, str]] = {}
    for line in (Path(__file__).parent / "names.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith(("#", "!")):
            module, names = line.rsplit(": ", 1)
            written = [item.partition("=") for item in names.split()]
            found[module] = {name: text or (name.lower() if sign else "") for name, sign, text in written}
    return found


@cache
def listed() -> dict[str, frozenset[str]]:
    """Return module ("." for the package) -> its public names."""
    return {module: frozenset(names) for module, names in _table().items()}


@cache
def _anywhere() -> frozenset[str]:
    """Return the names of all modules."""
    return frozenset[str]().union(*(names for module, names in listed().items() if ":" not in module))


@cache
def _texts() -> dict[str, str]:
    """Return the string constants of all modules, by name."""
    return {name: text for names in _table().values() for name, text in names.items() if text}


def reason_for(module: str, name: str) -> str:
    """Return why `name` of that module does not exist here."""
    if name in REASONS:
        return REASONS[name]
    parts = name.split(".") if module == "." else [*module.split("."), name]
    prefixes = [".".join(parts[:end]) for end in range(len(parts), -1, -1)]
    return next(REASONS[prefix] for prefix in prefixes if prefix in REASONS)


class Refused(type):
    """The metaclass of stand-ins: classes without instances."""

    reason: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(cls.reason)

    def __getattr__(cls, name: str) -> NoReturn:
        raise AttributeError(f"{cls.reason} (asked for its '{name}')" if not name.startswith("__") else name)


def _derived(cls: Any, /, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(cls.reason)


@cache
def stand_in(module: str, name: str) -> Refused:
    """Make the stand-in of a missing name."""
    place = "deepspeed" if module == "." else f"deepspeed.{module}"
    text = f"{place}.{name} is not in lowtide.deepspeed: {reason_for(module, name)}"
    contents = {"reason": text, "__doc__": text, "__init_subclass__": classmethod(_derived)}
    return Refused(name, (Exception,) if name.endswith(("Error", "Exception")) else (), contents)


def find(module: str, name: str) -> Any:
    """Return the object for `name` of a DeepSpeed module. Raises AttributeError if DeepSpeed does not have the name."""
    below = name if module == "." else f"{module}.{name}"
    # Python's import asks modules for names like `__path__`. A stand-in would answer with a class.
    if name.startswith("__") and name not in HOMES:
        raise AttributeError(f"module {_ROOT}.{module!r} has no attribute {name!r}")
    if module.split(".")[0] == "comm" and name in vars(comm := import_module(f"{_ROOT}.comm")):
        return getattr(comm, name)
    known, is_refused = listed().get(module, frozenset()), _is_refused(module)
    if is_module(below) and not is_refused and not (name in HOMES and name in known):
        return import_module(f"{_ROOT}.{below}")
    may_have = name in known or (module != "." and name in _anywhere())
    # A refused module may contain a name that exists elsewhere. Its full name is refused all the same.
    if below not in REASONS:
        if name in HOMES:
            return getattr(import_module(f"{_ROOT}.{HOMES[name]}".rstrip(".")), name)
        if name in _texts() and may_have:
            return _texts()[name]
    if may_have or is_refused:
        return stand_in(module, name)
    raise AttributeError(f"module 'deepspeed{'' if module == '.' else '.' + module}' has no attribute {name!r}")


def refused_attribute(owner: str, name: str) -> AttributeError:
    """Return the error for an attribute that an engine does not have."""
    if name in listed()["runtime.engine:DeepSpeedEngine"] | listed()["runtime.engine:PipelineEngine"]:
        why = ENGINE_REASONS.get(name, "it is part of DeepSpeed's internals; engine.lowtide is lowtide's engine")
        return AttributeError(f"{owner}.{name} is not in lowtide.deepspeed: {why}")
    return AttributeError(f"'{owner}' object has no attribute '{name}', nor has its module")


ENGINE_REASONS = {
    "register_compile_pass": "use engine.compile()",
    "get_wall_clock_timers": "use torch.profiler",
    "print_forward_breakdown": "use torch.profiler",
}


def is_module(name: str) -> bool:
    """Return whether DeepSpeed has a module of that name."""
    name = _ALIASES.get(name, name)
    modules = (*listed(), *_refused_trees())
    return any(module == name or module.startswith(f"{name}.") for module in modules) or _is_refused(name)


def _is_refused(module: str) -> bool:
    return any(module == tree or module.startswith(f"{tree}.") for tree in _refused_trees())


class _Module(ModuleType):
    """A module of DeepSpeed that finds its names on first use."""

    def __getattr__(self, name: str) -> Any:
        module = self.__name__.removeprefix(f"{_ROOT}.")
        if name == "__all__":  # of `from deepspeed.utils import *`
            return sorted(listed().get(_ALIASES.get(module, module), ()))
        found = find(_ALIASES.get(module, module), name)
        # Later uses find the attribute, and do not come here.
        setattr(self, name, found)
        return found

    def __dir__(self) -> list[str]:
        module = self.__name__.removeprefix(f"{_ROOT}.")
        return sorted({*super().__dir__(), *listed().get(_ALIASES.get(module, module), ())})


class Finder(MetaPathFinder, Loader):
    """Finds DeepSpeed's modules that are no files here, as the last finder."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if not fullname.startswith(f"{_ROOT}.") or not is_module(fullname.removeprefix(f"{_ROOT}.")):
            return None
        # As a package, so that Python also looks for modules below it.
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name, f"The names of DeepSpeed's {spec.name.removeprefix(_ROOT + '.')}.")

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: names are found on first use."""


def install() -> None:
    """Register the finder."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        # Last: a module that is a file here is found by Python's finders before.
        sys.meta_path.append(Finder())
