"""Every file of real projects in data/real_configs has the outcome in these tables: loads with notes, or faults."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from lowtide.engine.config.config import Config, ConfigError
from tests.kit import models
from tests.kit.ranks import RankPool

FILES = Path(__file__).parent / "data" / "real_configs"

# "z." stands for "zero_optimization.", "o." for "optimizer.params.", "s." for "scheduler.params.".
LOADS = {  # file: the keys that a note explains, in order
    "DeepSpeedExamples__training__BingBertSquad__1-bit_adam__mpi_infiniband__deepspeed_onebitadam_bsz96_config.json": (
        "o.cuda_aware o.comm_backend_name o.bias_correction"
    ),
    "DeepSpeedExamples__training__bing_bert__1-bit_adam__mpi_ethernet__deepspeed_bsz4k_onebitadam_config_seq128_mpi_ethernet.json": (  # noqa: E501
        "o.cuda_aware o.comm_backend_name o.bias_correction"
    ),
    "DeepSpeedExamples__training__bing_bert__1-bit_adam__mpi_infiniband__deepspeed_bsz4k_onebitadam_config_seq128_mpi_infiniband.json": (  # noqa: E501
        "o.cuda_aware o.comm_backend_name o.bias_correction"
    ),
    "DeepSpeedExamples__compression__bert__config__ds_config.json": "",
    "DeepSpeedExamples__compression__gpt2__config__ds_config.json": "optimizer.type",
    "DeepSpeedExamples__inference__sglang__ds_offload_cpu.json": (
        "z.stage3_param_persistence_threshold z.offload_param.buffer_size z.stage3_prefetch_bucket_size "
        "z.stage3_max_live_parameters gradient_clipping"
    ),
    "DeepSpeedExamples__training__autotuning__hf__dsconfigs__ds_config_fp16_z2.json": "gradient_clipping",
    "DeepSpeedExamples__training__autotuning__hf__dsconfigs__ds_config_fp16_z3.json": "gradient_clipping",
    "DeepSpeedExamples__training__autotuning__hf__dsconfigs__ds_config_z2.json": "gradient_clipping",
    "DeepSpeedExamples__training__bf16_master_weight__configs__baseline.json": (
        "z.overlap_comm z.reduce_bucket_size z.stage3_param_persistence_threshold gradient_clipping"
    ),
    "DeepSpeedExamples__training__pipeline_parallelism__ds_config.json": "optimizer.type gradient_clipping",
    "DeepSpeed__deepspeed__autotuning__config_templates__template_zero1.json": (
        "z.reduce_bucket_size z.allgather_bucket_size gradient_clipping"
    ),
    "DeepSpeed__deepspeed__autotuning__config_templates__template_zero2.json": (
        "z.allgather_partitions z.allgather_bucket_size z.overlap_comm z.reduce_scatter z.reduce_bucket_size "
        "z.contiguous_gradients gradient_clipping"
    ),
    "DeepSpeed__deepspeed__autotuning__config_templates__template_zero3.json": (
        "z.allgather_partitions z.allgather_bucket_size z.overlap_comm z.reduce_scatter z.reduce_bucket_size "
        "z.contiguous_gradients z.stage3_max_reuse_distance z.stage3_param_persistence_threshold "
        "z.stage3_gather_16bit_weights_on_model_save z.sub_group_size z.stage3_max_live_parameters "
        "gradient_clipping"
    ),
    "DeepSpeed__tests__accelerator__ds_config.json": "optimizer.type gradient_clipping",
    "DeepSpeed__tests__model__Megatron_GPT2__ds_config_func_bs4_zero2.json": (
        "z.reduce_bucket_size z.allgather_bucket_size z.reduce_scatter"
    ),
    "DeepSpeed__tests__model__Megatron_GPT2__ds_config_func_bs8_no_zero.json": "",
    "DeepSpeed__tests__model__Megatron_GPT2__ds_config_func_scheduler.json": "",
    "DeepSpeed__tests__model__Megatron_GPT2__ds_config_perf_bs16.json": "disable_allgather",
    "DeepSpeed__tests__torch_compile__ds_config_z3.json": (
        "z.reduce_scatter z.overlap_comm z.contiguous_gradients optimizer.type"
    ),
    "FastChat__playground__deepspeed_config_s3.json": (
        "z.overlap_comm z.stage3_max_reuse_distance z.stage3_param_persistence_threshold z.sub_group_size "
        "z.stage3_gather_16bit_weights_on_model_save fp16.enabled gradient_clipping"
    ),
    "DeepSpeed__tests__model__Megatron_GPT2__ds_config_func_bs8_zero2_gas3.json": (
        "z.reduce_bucket_size z.allgather_bucket_size z.reduce_scatter activation_checkpointing.partition_activations "
        "activation_checkpointing.contiguous_memory_optimization"
    ),
    "LLaMA-Factory__examples__deepspeed__ds_z3_fp8_config.json": (
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer z.overlap_comm z.sub_group_size "
        "z.reduce_bucket_size z.stage3_param_persistence_threshold z.stage3_max_reuse_distance "
        "z.stage3_gather_16bit_weights_on_model_save comms_config monitor_config gradient_clipping bf16.enabled "
        "z.stage3_max_live_parameters"
    ),
    "trlx__examples__summarize_rlhf__sft__ds_config_gptj.json": (
        "fp16.opt_level z.allgather_partitions z.allgather_bucket_size s.warmup_num_steps z.offload_param.device "
        "gradient_clipping o.weight_decay"
    ),
    "LLaMA-Factory__examples__deepspeed__ds_z3_config.json": (
        "zero_allow_untested_optimizer z.overlap_comm z.sub_group_size z.reduce_bucket_size "
        "z.stage3_param_persistence_threshold z.stage3_max_reuse_distance "
        "z.stage3_gather_16bit_weights_on_model_save gradient_clipping fp16.enabled bf16.enabled "
        "z.stage3_prefetch_bucket_size z.stage3_max_live_parameters"
    ),
    "LLaMA-Factory__examples__deepspeed__ds_z3_offload_config.json": (
        "zero_allow_untested_optimizer z.overlap_comm z.sub_group_size z.reduce_bucket_size "
        "z.stage3_param_persistence_threshold z.stage3_max_reuse_distance "
        "z.stage3_gather_16bit_weights_on_model_save gradient_clipping fp16.enabled bf16.enabled "
        "z.stage3_prefetch_bucket_size"
    ),
    "LLaVA-NeXT__scripts__zero2_offload.json": (
        "z.overlap_comm z.sub_group_size z.reduce_bucket_size fp16.enabled bf16.enabled z.offload_param.device "
        "gradient_clipping"
    ),
    "LLaVA__scripts__zero3_offload.json": (
        "z.overlap_comm z.sub_group_size z.reduce_bucket_size z.stage3_param_persistence_threshold "
        "z.stage3_max_reuse_distance z.gather_16bit_weights_on_model_save fp16.enabled bf16.enabled o.lr o.betas "
        "o.eps o.weight_decay s.warmup_min_lr s.warmup_max_lr s.warmup_num_steps z.stage3_prefetch_bucket_size "
        "gradient_clipping"
    ),
    "LMFlow__configs__archive__ds_config_eval.json": "gradient_clipping",
    "LMFlow__configs__deepspeed__zero2_no_offload.json": (
        "z.allgather_partitions z.allgather_bucket_size z.overlap_comm z.reduce_scatter z.reduce_bucket_size "
        "fp16.enabled bf16.enabled gradient_clipping"
    ),
    "LMFlow__configs__deepspeed__zero3_no_offload.json": (
        "z.overlap_comm z.sub_group_size z.reduce_bucket_size z.stage3_param_persistence_threshold "
        "z.stage3_max_reuse_distance z.stage3_gather_16bit_weights_on_model_save fp16.enabled bf16.enabled "
        "z.stage3_prefetch_bucket_size gradient_clipping z.stage3_max_live_parameters"
    ),
    "Megatron-DeepSpeed__examples_deepspeed__data_efficiency__gpt__eval__ds_config_eval_dummy.json": (
        "fp16.initial_scale_power fp16.loss_scale_window"
    ),
    "Megatron-DeepSpeed__examples_deepspeed__universal_checkpointing__ds_config.json": "gradient_clipping",
    "MiniCPM__finetune__configs__ds_config_zero3.json": (
        "z.allgather_partitions z.allgather_bucket_size z.reduce_scatter z.overlap_comm z.reduce_bucket_size "
        "z.stage3_param_persistence_threshold z.stage3_gather_16bit_weights_on_model_save fp16.enabled "
        "bf16.enabled z.stage3_prefetch_bucket_size"
    ),
    "Qwen__finetune__ds_config_zero2.json": (
        "z.allgather_partitions z.allgather_bucket_size z.overlap_comm z.reduce_scatter z.reduce_bucket_size "
        "fp16.enabled bf16.enabled o.lr o.betas o.eps o.weight_decay s.warmup_min_lr s.warmup_max_lr "
        "s.warmup_num_steps gradient_clipping"
    ),
    "accelerate__tests__deepspeed__ds_config_zero3_model_only.json": (
        "z.overlap_comm z.sub_group_size z.reduce_bucket_size z.stage3_param_persistence_threshold "
        "z.stage3_max_reuse_distance z.stage3_gather_16bit_weights_on_model_save fp16.enabled bf16.enabled "
        "gradient_clipping"
    ),
    "axolotl__deepspeed_configs__zero1.json": (
        "z.overlap_comm bf16.enabled fp16.enabled gradient_clipping fp16.auto_cast fp16.initial_scale_power"
    ),
    "axolotl__deepspeed_configs__zero2_torch_compile.json": (
        "compile.disable z.overlap_comm bf16.enabled fp16.enabled gradient_clipping fp16.auto_cast "
        "fp16.initial_scale_power"
    ),
    "axolotl__deepspeed_configs__zero3.json": (
        "z.overlap_comm z.sub_group_size z.reduce_bucket_size z.stage3_param_persistence_threshold "
        "z.max_reuse_distance z.gather_16bit_weights_on_model_save z.stage3_prefetch_bucket_size bf16.enabled "
        "fp16.enabled gradient_clipping z.stage3_max_live_parameters fp16.auto_cast fp16.initial_scale_power"
    ),
    "axolotl__deepspeed_configs__zero3_bf16_cpuoffload_all.json": (
        "zero_force_ds_cpu_optimizer zero_allow_untested_optimizer z.overlap_comm z.sub_group_size "
        "z.reduce_bucket_size z.stage3_param_persistence_threshold z.max_reuse_distance "
        "z.gather_16bit_weights_on_model_save z.stage3_prefetch_bucket_size gradient_clipping"
    ),
    "ms-swift__swift__config__zero0.json": (
        "z.allgather_partitions z.allgather_bucket_size z.overlap_comm z.reduce_scatter z.reduce_bucket_size "
        "fp16.enabled bf16.enabled gradient_clipping"
    ),
    "transformers__tests__deepspeed__ds_config_zero2.json": (
        "z.allgather_partitions z.allgather_bucket_size z.overlap_comm z.reduce_scatter z.reduce_bucket_size "
        "fp16.enabled bf16.enabled o.lr o.betas o.eps o.weight_decay s.warmup_min_lr s.warmup_max_lr "
        "s.warmup_num_steps gradient_clipping"
    ),
    "wenet__examples__aishell__whisper__conf__ds_stage2.json": (
        "zero_force_ds_cpu_optimizer z.allgather_partitions z.allgather_bucket_size z.overlap_comm "
        "z.reduce_scatter z.reduce_bucket_size fp16.auto_cast"
    ),
    "wenet__examples__wenetspeech__whisper__conf__ds_stage1.json": (
        "zero_force_ds_cpu_optimizer z.allgather_partitions z.allgather_bucket_size z.overlap_comm "
        "z.reduce_scatter z.reduce_bucket_size fp16.auto_cast"
    ),
    "xtuner__xtuner__configs__deepspeed__deepspeed_zero1.json": (
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer z.overlap_comm gradient_clipping fp16.enabled "
        "bf16.enabled"
    ),
    "xtuner__xtuner__configs__deepspeed__deepspeed_zero2_offload.json": (
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer z.overlap_comm gradient_clipping fp16.enabled "
        "bf16.enabled"
    ),
    "xtuner__xtuner__configs__deepspeed__deepspeed_zero3.json": (
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer z.overlap_comm "
        "z.stage3_gather_16bit_weights_on_model_save gradient_clipping fp16.enabled bf16.enabled"
    ),
}
FAULTS = {  # file: the path and the kind of each fault, in order
    "DeepSpeedExamples__compression__bert__config__XTC__ds_config_W1A8_Qgroup1_fp32.json": [
        "compression_training unsupported",
    ],
    "DeepSpeedExamples__compression__bert__config__ZeroQuant__ds_config_W48A8_Qgroup48_lkd_fp32.json": [
        "compression_training unsupported",
    ],
    "DeepSpeedExamples__compression__gpt2__config__ds_config_W4or8A8_Qgroup64_fp16.json": [
        "compression_training unsupported",
    ],
    "DeepSpeedExamples__training__DeepSpeed-ZenFlow__finetuning__zf_config.json": ["z.zenflow unsupported"],
    "DeepSpeedExamples__training__autotuning__hf__dsconfigs__ds_config_fp16_tune.json": ["autotuning unsupported"],
    "DeepSpeedExamples__training__bing_bert__01_adam__mpi_ethernet__deepspeed_bsz4k_01adam_config_seq128_mpi_ethernet.json": [  # noqa: E501
        "optimizer.type unsupported",
    ],
    "DeepSpeedExamples__training__bing_bert__1-bit_lamb__mpi_ethernet__deepspeed_bsz64k_onebitlamb_config_seq128_mpi_ethernet.json": [  # noqa: E501
        "optimizer.type unsupported",
    ],
    "DeepSpeedExamples__training__bing_bert__1-bit_lamb__nccl__deepspeed_bsz64k_onebitlamb_config_seq128_nccl.json": [
        "optimizer.type unsupported",
    ],
    "DeepSpeedExamples__training__data_efficiency__gpt_finetuning__config__ds_config_gpt_base_random_ltd.json": [
        "data_efficiency unsupported",
    ],
    "MedicalGPT__scripts__zero2.json": ["s.total_num_steps missing"],
    "MedicalGPT__scripts__zero3.json": ["s.total_num_steps missing"],
    "accelerate__examples__deepspeed_config_templates__zero_stage1_config.json": ["s.total_num_steps missing"],
    "bigscience__jz__configs__deepspeed__ds_zero2.json": ["s.total_num_steps missing"],
    "stanford_alpaca__configs__default_offload_opt_param.json": ["s.total_num_steps missing"],
}


def _short(path: str) -> str:
    for prefix, short in (("zero_optimization.", "z."), ("optimizer.params.", "o."), ("scheduler.params.", "s.")):
        if path.startswith(prefix):
            return short + path.removeprefix(prefix)
    return path


def test_the_tables_hold_every_file() -> None:
    assert sorted([*LOADS, *FAULTS]) == sorted(path.name for path in FILES.glob("*.json"))


def test_the_index_names_the_source_of_every_file() -> None:
    lines = (FILES / "INDEX.tsv").read_text().splitlines()[1:]
    assert sorted(line.split("\t")[0] for line in lines) == sorted(path.name for path in FILES.glob("*.json"))


@pytest.mark.parametrize("name", LOADS)
def test_it_loads_with_exactly_these_notes(name: str) -> None:
    config = Config.load(FILES / name)
    assert [_short(note.split(": ")[0]) for note in config.notes] == LOADS[name].split()
    if config.train_batch_size is None:
        resolved = config.resolve(4)
        assert resolved.train_batch_size is not None and resolved.train_batch_size % 4 == 0


FILL = {"scheduler.params.total_num_steps": 10}
TRAINED = [*LOADS, *(name for name, faults in FAULTS.items() if faults == ["s.total_num_steps missing"])]
SIZES = {"train_batch_size": None, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}


def kind_of(value: Any) -> Any:
    """A value of a config without its numbers."""
    if isinstance(value, dict):
        return {key: kind_of(one) for key, one in value.items()}
    if isinstance(value, list):
        return [kind_of(one) for one in value]
    return "number" if type(value) in (int, float) else value


def trained(folder: Path) -> dict[str, float]:
    """Two steps with each file, with batches of one row. The loss of the second.

    One trains for all that differ in numbers alone, at the same stage.
    """
    losses, of_kind = {}, dict[str, float]()
    for name in TRAINED:
        config = Config.load(FILES / name, fill=FILL).as_dict() | SIZES
        kind = json.dumps([config["zero_optimization"]["stage"], kind_of(config)], sort_keys=True)
        if kind in of_kind:
            losses[name] = of_kind[kind]
            continue
        config["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(folder)
        config["zero_optimization"]["offload_param"]["nvme_path"] = str(folder)
        optimizer = None if config["optimizer"] else torch.optim.AdamW
        torch.manual_seed(0)
        with lowtide.initialize(models.mlp(), config | {"device": "cpu"}, optimizer=optimizer) as engine:
            for step in range(2):
                result = engine.train_step(models.vector_batch(step, 1))
            losses[name] = of_kind[kind] = result.loss.item()
    return losses


def test_each_file_that_loads_trains(ranks: RankPool, tmp_path: Path) -> None:
    losses = ranks(2, trained, tmp_path)[0]
    assert list(losses) == TRAINED and all(math.isfinite(loss) for loss in losses.values())


def test_nearly_all_files_of_users_train() -> None:
    lines = [line.split("\t") for line in (FILES / "INDEX.tsv").read_text().splitlines()[1:]]
    users = [line[0] for line in lines if not line[1].startswith("deepspeedai/")]
    assert sum(name in TRAINED for name in users) >= 0.95 * len(users)


@pytest.mark.parametrize("name", FAULTS)
def test_it_has_exactly_these_faults(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(FILES / name)
    assert [f"{_short(fault.path)} {fault.kind}" for fault in caught.value.faults] == FAULTS[name]
    assert name in str(caught.value)
