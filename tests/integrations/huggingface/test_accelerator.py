"""Loops of Accelerate's users, over engines and over DistributedDataParallel."""

import importlib
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import pytest
import torch
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lowtide.checkpoint.folder import CheckpointFolder
from lowtide.huggingface import Accelerator
from tests.integrations.huggingface.test_checkpoints import late_commit
from tests.integrations.huggingface.trainings import Sentences, apart, llama, padded, stage
from tests.kit.models import Mlp, vector_batch
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import refusal

ROWS = 20  # 2 ranks x batches of 3: the last step of an epoch is of two rows a rank
SGD, ADAMW = partial(torch.optim.SGD, lr=0.1), partial(torch.optim.AdamW, lr=1e-2)


def accelerator_of(config: Any, **options: Any) -> Any:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    if config is None:
        return accelerate.Accelerator(cpu=True, **options)
    return Accelerator(lowtide=config, cpu=True, **options)


def loop(accelerator: Any, prepared: Any, epochs: int = 2, clips: bool = True, within: str = "") -> list[float]:
    """As in Accelerate's own examples; the losses and norms of the steps. within: a folder for saves within steps."""
    model, optimizer, loader, scheduler = prepared
    seen = []
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = model(x, y)
                accelerator.backward(loss)
                if accelerator.sync_gradients and clips:
                    seen.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if within and not accelerator.sync_gradients:
                accelerator.save_state(within)
            seen += [float(loss.detach()), scheduler.get_last_lr()[0]]
    return seen


def objects(optimizer: Any = ADAMW) -> tuple[Any, ...]:
    torch.manual_seed(3)
    model = Mlp()
    loader = DataLoader(TensorDataset(*vector_batch(0, ROWS)), batch_size=3, shuffle=True)
    return model, optimizer(model.parameters()), loader


def prepared_of(accelerator: Any) -> Any:
    model, optimizer, loader = objects()
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 12)
    return accelerator.prepare(model, optimizer, loader, scheduler)


def state_of(accelerator: Any, model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def train(folder: str, config: Any) -> Any:
    accelerator = accelerator_of(config, gradient_accumulation_steps=2, project_dir=folder)
    prepared = prepared_of(accelerator)
    seen = loop(accelerator, prepared)
    shown: list[Any] = []
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: shown.extend(models))
    accelerator.register_load_state_pre_hook(lambda models, folder: shown.extend(models))
    accelerator.save_state(folder)
    state = state_of(accelerator, prepared[0])
    more = loop(accelerator, prepared, 1, within=f"{folder}/within")
    again = []
    for saved in (folder, f"{folder}/within"):
        accelerator.load_state(saved)
        again += loop(accelerator, prepared, 1)
    assert config is None or shown == [prepared[0]] * 5
    assert accelerator.unwrap_model(prepared[0]).__class__ is Mlp
    num_rows = sum(len(accelerator.gather_for_metrics(y)) for _, y in prepared[2])
    accelerator.free_memory()
    return [*seen, *more, *again, num_rows], state


def resume(folder: str) -> Any:
    accelerator = accelerator_of(stage(2), gradient_accumulation_steps=2)
    prepared = prepared_of(accelerator)
    accelerator.load_state(folder)
    return accelerator.get_state_dict(prepared[0])


def test_a_loop_trains_saves_and_goes_on_as_over_ddp(ranks: RankPool, tmp_path: Path) -> None:
    """And what it has saved loads at another number of ranks."""
    numbers, state = ranks(2, train, str(tmp_path / "plain"), None)[0]
    found, of_ours = ranks(2, train, str(tmp_path / "ours"), stage(3))[0]
    assert found == pytest.approx(numbers, abs=1e-6) and found[-1] == ROWS
    assert apart(of_ours, state) < 1e-6
    assert apart(ranks(1, resume, str(tmp_path / "ours"))[0], of_ours) == 0


@on_ranks(2)
def test_a_state_is_removed_when_it_has_been_written(tmp_path: Path) -> None:
    naming = accelerate.utils.ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=1)
    accelerator = accelerator_of(stage(1, checkpoint={"async": True}), project_config=naming)
    prepared_of(accelerator)
    assert f"written to {tmp_path / 'checkpoints'}, found none" in refusal(accelerator.load_state)
    with mock.patch.object(CheckpointFolder, "commit", late_commit):
        for _ in range(2):
            accelerator.save_state()
    accelerator.load_state()
    accelerator.free_memory()


def clip_values(config: Any) -> Any:
    accelerator = accelerator_of(config, gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(*objects(partial(torch.optim.SGD, lr=0.5, momentum=0.9)))
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x, y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    state = state_of(accelerator, model)
    accelerator.free_memory()
    return state


def test_gradients_are_clipped_by_value_as_over_ddp(ranks: RankPool) -> None:
    plain, ours = (ranks(2, clip_values, config)[0] for config in (None, stage(3)))
    assert apart(ours, plain) < 1e-6


def train_by_config(config: Any) -> list[float]:
    accelerator = accelerator_of(config, mixed_precision="bf16")
    assert accelerator.mixed_precision == "bf16"
    model, optimizer, loader = objects(lambda params: DummyOptim(params, lr=1e-2, weight_decay=0.1))
    schedule = DummyScheduler(optimizer, total_num_steps=12, warmup_num_steps=3)
    seen = loop(accelerator, accelerator.prepare(model, optimizer, loader, schedule), 1, clips=False)
    more = objects(lambda params: DummyOptim(params, lr=1e-2, weight_decay=0.1))[:2]
    _, second, schedule = accelerator.prepare(*more, DummyScheduler(more[1], total_num_steps=12, warmup_num_steps=3))
    assert schedule.optimizer is second
    accelerator.end_training()
    return seen[1::2]


def test_optimizer_and_schedule_may_be_the_configs(ranks: RankPool) -> None:
    params = dict.fromkeys(("lr", "weight_decay"), "auto")
    steps = dict.fromkeys(("warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
    config = stage(3, optimizer={"type": "AdamW", "params": params}, gradient_clipping=0.5)
    config["scheduler"] = {"type": "WarmupDecayLR", "params": {**steps, "warmup_type": "linear"}}
    rates = ranks(2, train_by_config, config)[0]
    assert rates == pytest.approx([0, 0, 1e-2 / 3, 2e-2 / 3])  # DeepSpeed's warm-up begins with two steps at 0


@on_ranks(2)
def test_a_teacher_stands_beside_what_is_trained(tmp_path: Path) -> None:
    """A student with an optimizer, and a teacher without one. Both are saved, and load without an optimizer too."""
    accelerator = accelerator_of(stage(3))
    torch.manual_seed(1)
    teacher, student = nn.Linear(5, 5), nn.Linear(5, 5)
    found, learns, optimizer = accelerator.prepare(teacher, student, SGD(student.parameters()))
    losses = []
    for _ in range(8):
        x = torch.randn(4, 5)
        loss = (learns(x) - found(x)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert [type(one).__name__ for one in (found, learns)] == ["Engine", "Engine"] and losses[-1] < losses[0]
    found.set_full("weight", torch.full((5, 5), 2.0))
    accelerator.save_state(str(tmp_path))
    learned = learns.full("weight")
    found.set_full("weight", torch.full((5, 5), 3.0))
    accelerator.load_state(str(tmp_path))
    assert found.full("weight").eq(2).all()
    accelerator.free_memory()
    evaluation = accelerator_of(stage(2))
    evaluated = [evaluation.prepare(nn.Linear(5, 5))]
    with pytest.raises(ValueError, match=r"expected a state of 1 models, found 2 \(pytorch_model, pytorch_model_1\)"):
        evaluation.load_state(str(tmp_path))
    evaluated.append(evaluation.prepare(nn.Linear(5, 5)))
    evaluation.load_state(str(tmp_path))
    assert evaluated[0].full("weight").eq(2).all() and evaluated[1].full("weight").equal(learned)


@on_ranks(2)
def test_ranks_may_have_different_numbers_of_batches() -> None:
    weights = []
    for number in (0, 3):
        accelerator = accelerator_of(stage(number))
        torch.manual_seed(1)
        model = nn.Linear(5, 1)
        model, optimizer = accelerator.prepare(model, SGD(model.parameters()))
        with accelerator.join_uneven_inputs([model]):
            for _ in range(2 + accelerator.process_index):
                accelerator.backward(model(torch.ones(2, 5)).mean())
                optimizer.step()
                optimizer.zero_grad()
        weights.append({name: value.clone() for name, value in model.state_dict().items()})
        accelerator.free_memory()
    assert weights[0].keys() == weights[1].keys() or accelerator.process_index
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def loop_over_layers(parallel: dict[str, int] | None) -> Any:
    """What a loop sees: losses, norms and rates, what is collected of the ranks, and the state."""
    accelerator = accelerator_of(parallel and stage(2, parallel=parallel), gradient_accumulation_steps=2)
    model = llama(num_key_value_heads=2)
    optimizer = SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 8)
    loader: Any = DataLoader(Sentences(10), batch_size=2, collate_fn=padded)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    seen, rows, names = [], [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                seen.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        seen += [float(accelerator.gather(loss.detach()).mean()), scheduler.get_last_lr()[0]]
        seen += [float(accelerator.reduce(loss.detach())), float(accelerator.reduce(loss.detach(), "mean"))]
        rows += accelerator.gather_for_metrics(batch["input_ids"]).tolist()
        names += accelerator.gather_for_metrics([str(row.tolist()) for row in batch["input_ids"]])
    with accelerator.split_between_processes(list(range(5))) as own:
        parts = accelerator.gather_for_metrics([own], use_gather_object=True)
    state = state_of(accelerator, model)
    accelerator.free_memory()
    return seen, (rows, names, parts), state


def test_data_is_divided_over_those_that_have_other_data(ranks: RankPool) -> None:
    plain, ours = ranks(2, loop_over_layers, None)[0], ranks(4, loop_over_layers, {"tensor": 2})[0]
    assert ours[0] == pytest.approx(plain[0], abs=1e-6) and ours[1] == plain[1]
    assert apart(ours[2], plain[2]) < 1e-6


class ScheduleFree(torch.optim.SGD):
    """Has modes, as schedule-free optimizers do."""

    def train(self) -> None: ...


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return SGD(model.parameters())


MAKERS: dict[str, Callable[[nn.Module], Any]] = {
    "sgd": sgd,
    "with modes": lambda model: ScheduleFree(model.parameters(), lr=0.1),
    "dummy": lambda model: DummyOptim(model.parameters()),
    "dummy of groups": lambda model: DummyOptim([{"params": list(model.parameters())}]),
    "dummy schedule": lambda model: DummyScheduler(sgd(model)),
    "rows of 3": lambda model: objects()[2],
}
PLAIN = {"parallelism_config": accelerate.ParallelismConfig(dp_replicate_size=1)}
MIXED, EAGER = {"mixed_precision": "bf16"}, {"dynamo_backend": "eager"}
OF_CONFIG = {"optimizer": {"type": "AdamW", "params": {"lr": 1.0}}}
ROWS_OF_5, BLOCKS = {"train_micro_batch_size_per_gpu": 5}, {"compile": {"blocks": True}}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    # Sections of the config, options of the Accelerator, and what is prepared beside the model.
    'mixed_precision: expected "no", "bf16" or "fp16" with lowtide, found "fp8"': ({}, {"mixed_precision": "fp8"}, ()),
    "found false, but mixed_precision='bf16'; there is one compute dtype": ({"bf16": {"enabled": False}}, MIXED, ()),
    "(Accelerator(gradient_accumulation_steps)), found 4": ({"gradient_accumulation_steps": 4}, {}, ()),
    "expected only lowtide to divide the model, found a parallelism_config too": ({}, PLAIN, ()),
    "expected one optimizer for a model, found 2": ({}, {}, ("sgd", "sgd")),
    "expected an optimizer without modes, found ScheduleFree": ({}, {}, ("with modes",)),
    "a DummyOptim needs an optimizer in the config, found none": ({}, {}, ("dummy",)),
    "a DummyScheduler needs a scheduler in the config, found none": ({}, {}, ("sgd", "dummy schedule")),
    "expected a DummyOptim over parameters, found parameter groups": (OF_CONFIG, {}, ("dummy of groups",)),
    'expected "auto" or 3 (the data loader), found 5': (ROWS_OF_5, {}, ("sgd", "rows of 3")),
    "compile: found both the section in the config and torch_compile (or a dynamo_backend) in the": (
        BLOCKS,
        EAGER,
        ("sgd",),
    ),
}


@on_ranks(1)
@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_hold_is_an_error(said: str) -> None:
    sections, options, makers = REFUSED[said]

    def prepare() -> None:
        accelerator, model = accelerator_of(stage(3, **sections), **options), Mlp()
        accelerator.prepare(model, *(MAKERS[name](model) for name in makers))

    assert said in refusal(prepare)


@on_ranks(1)
def test_objects_of_a_loop_are_used_together() -> None:
    accelerator, model = accelerator_of(stage(3)), Mlp()
    prepared, optimizer = accelerator.prepare(model, sgd(model))
    some = list(prepared.parameters())[:2]
    assert "of them. Pass model.parameters()" in refusal(accelerator.clip_grad_norm_, some, 1.0)
    assert "optimizer.step(): expected a call without a closure" in refusal(optimizer.step, lambda: 0.0)
    other = Mlp()
    accelerator.prepare(other)
    said = "expected the optimizer in the same call as its model"
    assert said in refusal(accelerator.prepare, sgd(other))
    said = "load_state: expected input_dir, since automatic_checkpoint_naming is off"
    assert said in refusal(accelerator.load_state)


def test_names_in_docstrings_can_be_imported() -> None:
    names = set(re.findall(r"accelerate(?:\.\w+)+", Accelerator.prepare.__doc__ or ""))
    assert names == {"accelerate.utils.deepspeed.DummyOptim", "accelerate.utils.deepspeed.DummyScheduler"}
    for module, _, name in (name.rpartition(".") for name in names):
        assert hasattr(importlib.import_module(module), name)
