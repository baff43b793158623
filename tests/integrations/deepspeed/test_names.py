"""Each public name of DeepSpeed 0.19.8 is here, or says why it is not."""

import importlib
import inspect
from typing import Any

import pytest

import lowtide.deepspeed as deepspeed
from lowtide.deepspeed import names
from lowtide.deepspeed.config import GETTERS
from tests.kit.training import refusal

MODULES = {module: found for module, found in names.listed().items() if ":" not in module}
CLASSES = {module.partition(":")[2]: found for module, found in names.listed().items() if ":" in module}
HERE = {  # of what scripts import
    ".": "initialize init_distributed add_config_arguments get_accelerator comm zero ops pipe utils checkpointing "
    "DeepSpeedEngine DeepSpeedConfig PipelineModule PipelineEngine DeepSpeedDataLoader log_dist logger dist",
    "comm": "get_rank get_world_size get_local_rank all_reduce barrier broadcast all_gather new_group ReduceOp",
    "ops.adam": "FusedAdam DeepSpeedCPUAdam",
    "ops.lion": "FusedLion DeepSpeedCPULion",
    "pipe": "PipelineModule LayerSpec TiedLayerSpec",
    "runtime.pipe.topology": "PipeDataParallelTopology PipeModelDataParallelTopology ProcessTopology",
    "runtime.lr_schedules": "WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest",
    "runtime.engine": "DeepSpeedEngine dist",
    "runtime.zero.config": "OffloadDeviceEnum",  # which another module defines
    "runtime.zero.partition_parameters": "ZeroParamStatus GatheredParameters Init",
    "runtime.utils": "see_memory_usage set_random_seed clip_grad_norm_",
    "utils": "logger log_dist RepeatingLoader safe_get_full_fp32_param safe_set_full_grad set_z3_leaf_modules",
    "utils.zero_to_fp32": "get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint",
    "zero": "Init GatheredParameters register_external_parameter",
    "accelerator.real_accelerator": "get_accelerator",
    "comm.comm": "all_reduce init_distributed",
}


def module_of(name: str) -> Any:
    return importlib.import_module("lowtide.deepspeed" if name == "." else f"lowtide.deepspeed.{name}")


@pytest.mark.parametrize("module", sorted(MODULES))
def test_every_name_is_here_or_refused_with_its_reason(module: str) -> None:
    found = module_of(module)
    for name in MODULES[module]:
        value = getattr(found, name)
        if isinstance(value, names.Refused):
            with pytest.raises(NotImplementedError, match=rf"{name} is not in lowtide.deepspeed: \w+"):
                value()


@pytest.mark.parametrize("name", ["DeepSpeedEngine", "PipelineEngine"])
def test_every_method_is_here_or_refused_with_its_reason(name: str) -> None:
    theirs = CLASSES[name]
    missing = {one for one in theirs if not hasattr(getattr(deepspeed, name), one) and one not in GETTERS}
    for one in missing:
        assert "is not in lowtide.deepspeed: " in str(names.refused_attribute("DeepSpeedEngine", one))
    assert len(missing) < len(theirs) / 2


@pytest.mark.parametrize("module", HERE)
def test_most_of_what_scripts_import_is_here(module: str) -> None:
    found = module_of(module)
    for name in HERE[module].split():
        assert not isinstance(getattr(found, name), names.Refused), name


def test_the_package_finds_its_modules_before_they_are_imported() -> None:
    """As in `deepspeed.checkpointing.configure(...)` before `initialize`: an import sets the attribute."""
    assert names.find(".", "checkpointing") is importlib.import_module("lowtide.deepspeed.checkpointing")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (".", "add_tuning_arguments"),  # gone since 0.18
        ("zero", "MiCS_Init"),
        ("ops.transformer.inference.config", "DeepSpeedInferenceConfig"),
    ],
)
def test_names_of_older_versions_are_here(module: str, name: str) -> None:
    assert getattr(module_of(module), name) is not None


def test_a_name_is_the_same_wherever_it_is_imported_from() -> None:
    from lowtide.deepspeed.ops.adam import FusedAdam
    from lowtide.deepspeed.ops.adam.fused_adam import FusedAdam as Again

    assert FusedAdam is Again is deepspeed.ops.adam.FusedAdam and inspect.isclass(FusedAdam)
    found: dict[str, object] = {}
    exec("from lowtide.deepspeed.utils import *", found)
    assert MODULES["utils"] <= found.keys()


def test_stand_ins_are_imported_and_cannot_be_used() -> None:
    from lowtide.deepspeed.moe.layer import MoE
    from lowtide.deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    assert not isinstance(object(), DeepSpeedZeroOptimizer_Stage3)
    with pytest.raises(AttributeError, match=r"set parallel.expert .* \(asked for its 'experts'\)"):
        _ = MoE.experts
    onebit, old = deepspeed.runtime.fp16.onebit, r'.* type "OneBitAdam"; there is no 0/1 Adam or 1-bit'
    for call, said in (
        (MoE, r"deepspeed.moe.layer.MoE .*: set parallel.expert in the config"),
        (lambda _: type("Own", (MoE,), {}), r"set parallel.expert"),
        (deepspeed.init_inference, "lowtide trains; serve what"),
        (deepspeed.utils.timer.SynchronizedWallClockTimer, r"Timer .*: use torch.profiler"),
        (onebit.OnebitAdam, rf"OnebitAdam .*: {old}"),
        (onebit.OnebitLamb, rf"OnebitLamb .*: {old}"),
        (onebit.ZeroOneAdam, rf"ZeroOneAdam .*: {old}"),
        # Where the same name means another thing elsewhere.
        (deepspeed.utils.groups.initialize, r"utils.groups.initialize .*: set parallel in the config"),
        (deepspeed.comm.configure, r"comm.configure .*: use engine.lowtide.profile\(\)"),
    ):
        with pytest.raises(NotImplementedError, match=said):
            call(2)


def test_constants_are_texts() -> None:
    constants, info = deepspeed.runtime.constants, deepspeed.git_version_info
    assert deepspeed.checkpoint.UNIVERSAL_CHECKPOINT_INFO == "universal_checkpoint_info"
    assert (constants.TRAIN_BATCH_SIZE, constants.FP16_ENABLED) == ("train_batch_size", "enabled")
    assert (info.version, info.git_hash) == (deepspeed.__version__, None) and info.installed_ops["fused_adam"]


def test_errors_are_exceptions() -> None:
    for error in (deepspeed.elasticity.ElasticityError, deepspeed.runtime.zero.utils.ZeRORuntimeException):
        with pytest.raises(OSError, match="not one of DeepSpeed's"):
            try:
                raise OSError("not one of DeepSpeed's")
            except error:
                pass


def test_what_deepspeed_does_not_have_is_an_attribute_error() -> None:
    for module, name in ((deepspeed, "initialise"), (deepspeed.comm, "get_rang")):
        said = f"module '{module.__name__.removeprefix('lowtide.')}' has no attribute '{name}'"
        assert said in refusal(getattr, module, name, kind=AttributeError)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("lowtide.deepspeed.nothing_of_the_kind")
