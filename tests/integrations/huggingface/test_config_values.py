"""What of a config a Trainer's arguments fill, and what the two cannot say together."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState

from lowtide import Config, ConfigError
from lowtide.huggingface import Accelerator, TrainingArguments
from lowtide.huggingface.arguments import config_of, fill_steps
from tests.integrations.huggingface.trainings import arguments, closed, trainer
from tests.kit.ranks import on_ranks
from tests.kit.training import refusal

AUTO = {
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
    },
    "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto", "reduce_bucket_size": "auto"},
}
OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 3,
    "gradient_accumulation_steps": 4,
    "learning_rate": 2e-3,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-6,
    "weight_decay": 0.02,
    "max_grad_norm": 0.7,
    "warmup_steps": 5,
    "bf16": True,
}


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)


def args(tmp_path: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(**arguments(str(tmp_path), **options))


def test_auto_is_what_the_arguments_say(tmp_path: Path) -> None:
    given = args(tmp_path, **OPTIONS)
    config = config_of(AUTO, given)
    fill_steps(config, given, 40)
    values = config.filled()
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    assert [values[key] for key in sizes] == [12, 3, 4, 0.7]
    assert (values["bf16"], values["fp16"], values["device"]) == ({"enabled": True}, {"enabled": False}, "cpu")
    params = {"lr": 2e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.02}
    assert values["optimizer"]["params"] == params
    steps = {"warmup_min_lr": 0, "warmup_max_lr": 2e-3, "warmup_num_steps": 5, "total_num_steps": 40}
    assert values["scheduler"]["params"] == steps
    assert config.of_training()["gradient_accumulation_steps"] == 1  # the Trainer weighs its losses itself


@on_ranks(1)
def test_a_training_has_what_auto_is(tmp_path: Path) -> None:
    made = trainer(str(tmp_path), AUTO, {**OPTIONS, "max_steps": 1})
    made.train()
    assert refusal(made.train) == (
        "Trainer.train: expected a single training with the scheduler of the config, found a second training. The "
        "schedule is at step 1 and would not begin again. Remove the section `scheduler`, and set lr_scheduler_type: "
        "transformers' schedule begins again with each training"
    )
    values = made.engine.config.model_dump()
    closed(made)
    params = values["optimizer"]["params"]
    assert (params["lr"], params["eps"], params["weight_decay"]) == (2e-3, 1e-6, 0.02)
    assert list(params["betas"]) == [0.9, 0.95]
    assert (values["bf16"]["enabled"], values["fp16"]["enabled"]) == (True, False)


def test_auto_is_filled_under_any_name_of_a_key_and_the_log_says_so(tmp_path: Path) -> None:
    config = config_of({"bfloat16": {"enabled": "auto"}}, args(tmp_path, **OPTIONS))
    assert config.is_on("bf16")
    assert Config.load(config.of_training(), fill=config.fill).notes == (
        'bf16.enabled: "auto" is true: it was given as `fill`',
    )


def test_a_missing_option_of_the_optimizer_is_that_of_the_arguments(tmp_path: Path) -> None:
    """Adam's, only if they were set: other optimizers have other defaults, or no such option."""

    def params_of(section: dict[str, Any], **options: Any) -> Any:
        return config_of({"optimizer": section}, args(tmp_path, **options)).check().as_dict()["optimizer"]["params"]

    expected = {"lr": 2e-3, "weight_decay": 0.02, "betas": [0.9, 0.95], "eps": 1e-6}
    for section in ({"type": "AdamW"}, {"type": "FusedAdam", "params": {}}):
        assert expected.items() <= params_of(section, **OPTIONS).items()
    assert params_of({"type": "Lion"}, **OPTIONS)["betas"] == [0.9, 0.95]
    assert params_of({"type": "Lion"})["betas"] == [0.9, 0.99]
    assert params_of({"type": "Adagrad"}, **OPTIONS)["eps"] == 1e-10
    assert params_of({"type": "SGD"}, **OPTIONS)["lr"] == 2e-3


@pytest.mark.parametrize(("kind", "default"), [("WarmupLR", 1000), ("constant", 0)])
def test_a_missing_warmup_of_the_scheduler_is_that_of_the_arguments(tmp_path: Path, kind: str, default: int) -> None:
    for given, expected in ((0, [default, default]), (0.1, [4, 8])):
        options = args(tmp_path, warmup_steps=given)
        config = config_of({"optimizer": {"type": "AdamW"}, "scheduler": {"type": kind}}, options)
        found = []
        for num_steps in (40, 80):  # a second training of the trainer
            fill_steps(config, options, num_steps)
            found.append(config.check().model_dump()["scheduler"]["params"]["warmup_num_steps"])
        assert found == expected
    options, scheduler = args(tmp_path), {"type": kind, "params": {"warmup_num_steps": 2}}
    config = config_of({"optimizer": {"type": "AdamW"}, "scheduler": scheduler}, options)
    said = refusal(fill_steps, config, options, 40)
    assert 'warmup_num_steps: expected "auto" or 1 (the least, for warmup_steps=0), found 2; change one of' in said


def test_an_optimizer_or_schedule_beside_the_configs_is_an_error(tmp_path: Path) -> None:
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    schedule = torch.optim.lr_scheduler.ConstantLR(sgd)
    cases: Any = (
        ("optimizers", (sgd, None)),
        ("optimizer_cls_and_kwargs", (torch.optim.SGD, {})),
        ("optimizers", (None, schedule)),
    )
    for section, (name, value) in zip(("optimizer", "optimizer", "scheduler"), cases, strict=True):
        said = refusal(trainer, str(tmp_path), AUTO, **{name: value})
        assert said.startswith(f"{section}: found both the section in the config and the Trainer's argument")


def test_text_that_is_the_value_of_an_argument_contradicts_nothing(tmp_path: Path) -> None:
    text = {"gradient_clipping": "0.7", "bf16": {"enabled": "true"}, "parallel": {"pipeline": "1"}}
    assert config_of(text, args(tmp_path, **OPTIONS)).check().bf16.enabled


def test_of_a_preset_only_how_it_is_divided_and_computed_is_taken(tmp_path: Path) -> None:
    config = config_of("zero3-bf16", args(tmp_path))
    assert config.values["zero_optimization"] == {"stage": 3} and config.is_on("bf16")
    assert not config.has("optimizer") and not config.has("gradient_clipping")


def test_the_config_may_be_given_on_the_command_line(tmp_path: Path) -> None:
    given = args(tmp_path, lowtide='{"zero_optimization": {"stage": 2}}')
    assert given.lowtide == {"zero_optimization": {"stage": 2}}


CONTRADICTIONS: list[tuple[str, Any, str]] = [  # a key's path, its value, and what is said of it
    ("train_micro_batch_size_per_gpu", 8, 'expected "auto" or 4 (per_device_train_batch_size), found 8; change one of'),
    ("gradient_accumulation_steps", 2, "(gradient_accumulation_steps), found"),
    ("pipeline.microbatches", 2, "(gradient_accumulation_steps), found 2"),
    ("gradient_clipping", 1.0, "(max_grad_norm), found 1.0"),
    ("seed", 1, "(seed), found 1"),
    ("optimizer.params.betas", [0, 0], "(adam_beta1 and adam_beta2), found [0, 0]"),
    ("fp16.enabled", True, "there is one compute dtype: change one"),
    ("device", "cuda", "(the trainer's device)"),
    ("parallel.tensor", 2, "tensor(2) x data(?) = world size (1) does not hold"),
    ("parallel.pipeline", 2, "their loop calls forward and backward itself"),
    ("zero_optimisation", {}, "did you mean"),
]


@pytest.mark.parametrize(("path", "value", "said"), CONTRADICTIONS)
def test_a_contradiction_is_an_error_that_names_both(tmp_path: Path, path: str, value: Any, said: str) -> None:
    config = value
    for key in reversed(path.split(".")):
        config = {key: config}
    if "optimizer" in config:
        config["optimizer"]["type"] = "AdamW"
    with pytest.raises(ConfigError) as error:
        config_of(config, args(tmp_path, bf16=path == "fp16.enabled"))
    assert path in [fault.path for fault in error.value.faults] and said in str(error.value)


ZERO3: Any = "zero3"
IN_BACKWARD = {"zero_optimization": {"update_in_backward": True}}
LAYERWISE = "galore_adamw_layerwise"
ONE_CYCLE = {"optimizer": AUTO["optimizer"], "scheduler": {"type": "OneCycle"}}


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        (ZERO3, {"fsdp": "full_shard"}, "expected no fsdp with lowtide"),
        (ZERO3, {"ddp_broadcast_buffers": True}, "expected no ddp_broadcast_buffers with lowtide"),
        (ZERO3, {"optim": LAYERWISE}, "found optim=OptimizerNames.GALORE_ADAMW_LAYERWISE: it updates"),
        (ZERO3, {"bf16_full_eval": True}, "bf16_full_eval needs bf16=True"),
        (AUTO, {"optim": "sgd"}, "found optim=sgd: the config has an optimizer"),
        (AUTO, {"optim_args": "amsgrad=True"}, "found optim_args=amsgrad=True: the config has an optimizer"),
        (AUTO, {"lr_scheduler_kwargs": {"num_cycles": 2}}, "found lr_scheduler_kwargs={'num_cycles': 2}: the config"),
        (ONE_CYCLE, {"warmup_steps": 2}, 'found warmup_steps=2: the scheduler "OneCycle" of the config has no warmup'),
        (AUTO, {"lr_scheduler_type": "cosine"}, "found lr_scheduler_type=cosine: the config has a scheduler"),
        (AUTO, {"auto_find_batch_size": True}, "a training with smaller batches would go on with the schedule of the "),
        (IN_BACKWARD, {}, "expected max_grad_norm=0 with update_in_backward"),
    ],
)
def test_an_argument_that_cannot_hold_is_an_error(tmp_path: Path, config: Any, options: Any, said: str) -> None:
    assert said in refusal(config_of, config, args(tmp_path, **options))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("deepspeed", "ds.json", "expected no deepspeed with lowtide, found deepspeed=ds.json: there is one engine"),
        ("_n_gpu", 2, "expected no n_gpu with lowtide, found n_gpu=2: start a process for each GPU, by `low"),
        ("save_on_each_node", True, "found save_on_each_node=True: all hosts write one checkpoint"),
    ],
)
def test_an_argument_of_other_machines_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, said: str
) -> None:
    given = args(tmp_path)
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    setattr(given, name, value)
    assert said in refusal(config_of, "zero3", given)


def test_on_a_host_without_accelerators_processes_join_on_the_cpu(tmp_path: Path) -> None:
    options = {key: value for key, value in arguments(str(tmp_path)).items() if key != "use_cpu"}
    assert TrainingArguments(**options).use_cpu is not torch.accelerator.is_available()


def test_processes_that_accelerate_does_not_see_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    if dist.is_initialized():  # a training before this one may have left a group of this process alone
        dist.destroy_process_group()
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = "expected the 2 processes of the launcher, found 1 in accelerate: each would"
    assert said in refusal(Accelerator, lowtide="zero3", cpu=False)
