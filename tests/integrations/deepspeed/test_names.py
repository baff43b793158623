"""Each public name of DeepSpeed 0.19.8 is here, or says why it is not."""

import importlib
import inspect

import pytest

import lowtide.deepspeed as deepspeed
from lowtide.deepspeed import names
from lowtide.deepspeed.config import GETTERS

MODULES = {module: found for module, found in names.listed().items() if ":" not in module}
CLASSES = {module.partition(":")[2]: found for module, found in names.listed().items() if ":" in module}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_every_name_is_here_or_refused_with_its_reason(module: str) -> None:
    found = importlib.import_module("lowtide.deepspeed" if module == "." else f"lowtide.deepspeed.{module}")
    for name in MODULES[module]:
        value = getattr(found, name)
        if isinstance(value, names.Refused):
            with pytest.raises(NotImplementedError, match=rf"{name} is not in lowtide.deepspeed: \w+"):
                value()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (deepspeed.DeepSpeedEngine, CLASSES["DeepSpeedEngine"]),
        (deepspeed.PipelineEngine, CLASSES["PipelineEngine"]),
    ],
)
def test_every_method_is_here_or_refused_with_its_reason(ours: type, theirs: frozenset[str]) -> None:
    missing = {name for name in theirs if not hasattr(ours, name) and name not in GETTERS}
    for name in missing:
        assert "is not in lowtide.deepspeed: " in str(names.refused_attribute("DeepSpeedEngine", name))
    assert len(missing) < len(theirs) / 2


def test_most_of_what_scripts_import_is_here() -> None:
    wanted = {
        ".": "initialize init_distributed add_config_arguments get_accelerator comm zero ops pipe utils checkpointing "
        "DeepSpeedEngine DeepSpeedConfig PipelineModule PipelineEngine DeepSpeedDataLoader log_dist logger dist",
        "comm": "get_rank get_world_size get_local_rank all_reduce barrier broadcast all_gather new_group ReduceOp",
        "ops.adam": "FusedAdam DeepSpeedCPUAdam",
        "ops.lion": "FusedLion DeepSpeedCPULion",
        "pipe": "PipelineModule LayerSpec TiedLayerSpec",
        "runtime.pipe.topology": "PipeDataParallelTopology PipeModelDataParallelTopology ProcessTopology",
        "runtime.lr_schedules": "WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest",
        "runtime.engine": "DeepSpeedEngine",
        "runtime.zero.partition_parameters": "ZeroParamStatus GatheredParameters Init",
        "runtime.utils": "see_memory_usage set_random_seed clip_grad_norm_",
        "utils": "logger log_dist RepeatingLoader safe_get_full_fp32_param safe_set_full_grad set_z3_leaf_modules",
        "utils.zero_to_fp32": "get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint",
        "zero": "Init GatheredParameters register_external_parameter",
        "accelerator.real_accelerator": "get_accelerator",
        "comm.comm": "all_reduce init_distributed",
    }
    for module, listed in wanted.items():
        found = importlib.import_module("lowtide.deepspeed" if module == "." else f"lowtide.deepspeed.{module}")
        for name in listed.split():
            assert not isinstance(getattr(found, name), names.Refused), (module, name)


def test_a_name_is_the_same_wherever_it_is_imported_from() -> None:
    from lowtide.deepspeed.ops.adam import FusedAdam
    from lowtide.deepspeed.ops.adam.fused_adam import FusedAdam as Again

    assert FusedAdam is Again is deepspeed.ops.adam.FusedAdam
    assert inspect.isclass(FusedAdam)


def test_all_names_of_a_module_are_imported_by_a_star() -> None:
    found: dict[str, object] = {}
    exec("from lowtide.deepspeed.utils import *", found)
    assert MODULES["utils"] <= found.keys()


def test_stand_ins_are_imported_and_cannot_be_used() -> None:
    from lowtide.deepspeed.moe.layer import MoE
    from lowtide.deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    assert not isinstance(object(), DeepSpeedZeroOptimizer_Stage3)
    with pytest.raises(NotImplementedError, match=r"deepspeed.moe.layer.MoE .*: set parallel.expert in the config"):
        MoE(8)
    with pytest.raises(NotImplementedError, match=r"set parallel.expert"):
        type("Own", (MoE,), {})
    with pytest.raises(AttributeError, match=r"set parallel.expert .* \(asked for its 'experts'\)"):
        _ = MoE.experts
    with pytest.raises(NotImplementedError, match="lowtide trains; serve what"):
        deepspeed.init_inference(None)
    for name in ("OnebitAdam", "OnebitLamb", "ZeroOneAdam"):
        with pytest.raises(
            NotImplementedError, match=rf'{name} .*: .* type "OneBitAdam"; there is no 0/1 Adam or 1-bit'
        ):
            getattr(deepspeed.runtime.fp16.onebit, name)([])


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (".", "add_tuning_arguments"),  # gone since 0.18
        ("zero", "MiCS_Init"),
        ("runtime.zero.config", "OffloadDeviceEnum"),  # which another module defines
        ("runtime.engine", "dist"),
        ("ops.transformer.inference.config", "DeepSpeedInferenceConfig"),
    ],
)
def test_names_of_older_versions_and_of_other_modules_are_here(module: str, name: str) -> None:
    found = importlib.import_module("lowtide.deepspeed" if module == "." else f"lowtide.deepspeed.{module}")
    assert getattr(found, name) is not None


def test_constants_are_texts() -> None:
    constants, info = deepspeed.runtime.constants, deepspeed.git_version_info
    assert deepspeed.checkpoint.UNIVERSAL_CHECKPOINT_INFO == "universal_checkpoint_info"
    assert (constants.TRAIN_BATCH_SIZE, constants.FP16_ENABLED) == ("train_batch_size", "enabled")
    assert (info.version, info.git_hash) == (deepspeed.__version__, None)
    assert info.installed_ops["fused_adam"]


def test_a_name_has_a_reason_where_the_same_name_means_another_thing_elsewhere() -> None:
    with pytest.raises(NotImplementedError, match=r"utils.groups.initialize .*: set parallel in the config"):
        deepspeed.utils.groups.initialize(ep_size=2)
    with pytest.raises(NotImplementedError, match=r"comm.configure .*: use engine.lowtide.profile\(\)"):
        deepspeed.comm.configure(enabled=True)


def test_errors_are_exceptions() -> None:
    for error in (deepspeed.elasticity.ElasticityError, deepspeed.runtime.zero.utils.ZeRORuntimeException):
        with pytest.raises(OSError, match="not one of DeepSpeed's"):
            try:
                raise OSError("not one of DeepSpeed's")
            except error:
                pass


def test_what_deepspeed_does_not_have_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'deepspeed' has no attribute 'initialise'"):
        _ = deepspeed.initialise
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("lowtide.deepspeed.nothing_of_the_kind")
    with pytest.raises(AttributeError, match=r"module 'deepspeed.comm' has no attribute 'get_rang'"):
        _ = deepspeed.comm.get_rang
