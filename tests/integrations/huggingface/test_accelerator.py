"""Loops of Accelerate's users, over engines and over DistributedDataParallel."""

import importlib
import re
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lowtide.huggingface import Accelerator
from tests.kit.models import Mlp, vector_batch
from tests.kit.ranks import RankPool

ROWS = 20  # 2 ranks x batches of 3: the last step of an epoch is of two rows a rank


def accelerator_of(config: Any, **options: Any) -> Any:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    if config is None:
        return accelerate.Accelerator(cpu=True, **options)
    return Accelerator(lowtide=config, cpu=True, **options)


def stage(number: int, **sections: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": number}, **sections}


def loop(accelerator: Any, prepared: Any, epochs: int = 2, clips: bool = True) -> list[float]:
    """As in Accelerate's own examples; the losses and norms of the steps."""
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
            seen += [float(loss.detach()), scheduler.get_last_lr()[0]]
    return seen


def objects(optimizer: Any = None) -> tuple[Any, ...]:
    torch.manual_seed(3)
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2) if optimizer is None else optimizer(model.parameters())
    loader = DataLoader(TensorDataset(*vector_batch(0, ROWS)), batch_size=3, shuffle=True)
    return model, optimizer, loader


def prepared_of(accelerator: Any) -> Any:
    model, optimizer, loader = objects()
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 12)
    return accelerator.prepare(model, optimizer, loader, scheduler)


def train(folder: str, configs: list[Any]) -> list[Any]:
    outcomes = []
    for number, config in enumerate(configs):
        accelerator = accelerator_of(config, gradient_accumulation_steps=2, project_dir=folder)
        prepared = prepared_of(accelerator)
        seen = loop(accelerator, prepared)
        shown: list[Any] = []
        accelerator.register_save_state_pre_hook(lambda models, weights, folder: shown.extend(models))  # noqa: B023
        accelerator.register_load_state_pre_hook(lambda models, folder: shown.extend(models))  # noqa: B023
        accelerator.save_state(f"{folder}/{number}")
        state = {name: value.clone() for name, value in accelerator.get_state_dict(prepared[0]).items()}
        more = loop(accelerator, prepared, 1)
        accelerator.load_state(f"{folder}/{number}")
        again = loop(accelerator, prepared, 1)
        assert config is None or shown == [prepared[0]] * 2
        assert accelerator.unwrap_model(prepared[0]).__class__ is Mlp
        gathered = [accelerator.gather_for_metrics(y) for x, y in prepared[2]]
        outcomes.append((seen, state, more, again, sum(map(len, gathered))))
        accelerator.free_memory()
    return outcomes


def test_a_loop_trains_saves_and_goes_on_as_over_ddp(ranks: RankPool, tmp_path: Path) -> None:
    plain, *ours = ranks(2, train, str(tmp_path), [None, *map(stage, range(4))])[0]
    for outcome in ours:
        seen, state, more, again, rows = outcome
        assert seen == pytest.approx(plain[0], abs=1e-6)
        assert max(float((state[name] - value).abs().max()) for name, value in plain[1].items()) < 1e-6
        assert more == pytest.approx(plain[2], abs=1e-6)
        assert again == pytest.approx(plain[3], abs=1e-6)
        assert rows == ROWS
    assert ours[0][0] == ours[1][0]
    assert ours[2][0] == ours[3][0]


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
    state = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.free_memory()
    return state


def test_gradients_are_clipped_by_value_as_over_ddp(ranks: RankPool) -> None:
    plain, *ours = (ranks(2, clip_values, config)[0] for config in (None, stage(0), stage(3)))
    for state in ours:
        assert max(float((state[name] - value).abs().max()) for name, value in plain.items()) < 1e-6


def resume(folder: str) -> Any:
    accelerator = accelerator_of(stage(2), gradient_accumulation_steps=2)
    prepared = prepared_of(accelerator)
    accelerator.load_state(folder)
    return prepared[1].param_groups[0]["lr"], accelerator.get_state_dict(prepared[0])


def test_a_state_loads_at_another_number_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    saved = ranks(2, train, str(tmp_path), [stage(3)])[0][0][1]
    _, found = ranks(1, resume, str(tmp_path / "0"))[0]
    assert all(torch.equal(found[name], value) for name, value in saved.items())


def train_by_config(folder: str, config: Any) -> list[float]:
    accelerator = accelerator_of(config, mixed_precision="bf16")
    assert accelerator.mixed_precision == "bf16"
    model, optimizer, loader = objects(lambda params: DummyOptim(params, lr=1e-2, weight_decay=0.1))
    schedule = DummyScheduler(optimizer, total_num_steps=12, warmup_num_steps=3)
    prepared = accelerator.prepare(model, optimizer, loader, schedule)
    seen = loop(accelerator, prepared, 1, clips=False)
    lrs = seen[1::2]
    accelerator.end_training()
    return lrs


def test_optimizer_and_schedule_may_be_the_configs(ranks: RankPool, tmp_path: Path) -> None:
    params = dict.fromkeys(("lr", "weight_decay"), "auto")
    steps = dict.fromkeys(("warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
    config = stage(3, optimizer={"type": "AdamW", "params": params}, gradient_clipping=0.5)
    config["scheduler"] = {"type": "WarmupDecayLR", "params": {**steps, "warmup_type": "linear"}}
    lrs = ranks(2, train_by_config, str(tmp_path), config)[0]
    assert lrs == pytest.approx([0, 0, 1e-2 / 3, 2e-2 / 3])  # DeepSpeed's warm-up begins with two steps at 0


def two_models() -> tuple[float, float, list[str]]:
    """A student with an optimizer, and a teacher without one."""
    accelerator = accelerator_of(stage(3))
    torch.manual_seed(1)
    teacher, student = nn.Linear(5, 5), nn.Linear(5, 5)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    found, learns, optimizer = accelerator.prepare(teacher, student, optimizer)
    losses = []
    for _ in range(8):
        x = torch.randn(4, 5)
        loss = (learns(x) - found(x)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    kinds = [type(one).__name__ for one in (found, learns)]
    return losses[0], losses[-1], kinds


def test_a_teacher_stands_beside_what_is_trained(ranks: RankPool) -> None:
    first, last, kinds = ranks(2, two_models)[0]
    assert last < first
    assert kinds == ["Engine", "Engine"]


def uneven(config: Any) -> Any:
    accelerator = accelerator_of(config)
    torch.manual_seed(1)
    model = nn.Linear(5, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with accelerator.join_uneven_inputs([model]):
        for _ in range(2 + accelerator.process_index):
            accelerator.backward(model(torch.ones(2, 5)).mean())
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()["weight"] if accelerator.process_index == 0 else model.state_dict()


def test_ranks_may_have_different_numbers_of_batches(ranks: RankPool) -> None:
    first, other = (ranks(2, uneven, stage(number))[0] for number in (0, 3))
    assert torch.equal(first, other)


class ScheduleFree(torch.optim.SGD):
    """Has modes, as schedule-free optimizers do."""

    def train(self) -> None: ...


def _one(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def refusal(case: str) -> None:
    if case == "fp8":
        accelerator_of(stage(3), mixed_precision="fp8")
    if case == "parallelism":
        plain = accelerate.ParallelismConfig(dp_replicate_size=1)
        accelerator_of(stage(3), parallelism_config=plain)
    if case == "precision":
        accelerator_of(stage(3, bf16={"enabled": False}), mixed_precision="bf16")
    if case == "accumulation":
        accelerator_of(stage(3, gradient_accumulation_steps=4))
    accelerator = accelerator_of(stage(3))
    model = Mlp()
    if case == "apart":
        accelerator.prepare(model)
        accelerator.prepare(_one(model))
    if case == "twice":
        accelerator.prepare(model, _one(model), _one(model))
    if case == "modes":
        accelerator.prepare(model, ScheduleFree(model.parameters(), lr=0.1))
    if case == "dummy":
        accelerator.prepare(model, DummyOptim(model.parameters()))
    if case == "dummy schedule":
        optimizer = _one(model)
        accelerator.prepare(model, optimizer, DummyScheduler(optimizer))
    if case == "groups":
        accelerator = accelerator_of(stage(3, optimizer={"type": "AdamW", "params": {"lr": 1.0}}))
        accelerator.prepare(model, DummyOptim([{"params": list(model.parameters())}]))
    if case == "batch":
        accelerator = accelerator_of(stage(3, train_micro_batch_size_per_gpu=5))
        accelerator.prepare(*objects())
    _, optimizer = accelerator.prepare(model, _one(model))
    if case == "compiled twice":
        accelerator = accelerator_of(stage(3, compile={"blocks": True}), dynamo_backend="eager")
        accelerator.prepare(*objects())
    if case == "some":
        accelerator.clip_grad_norm_(list(model.parameters())[:2], 1.0)
    if case == "closure":
        optimizer.step(lambda: 0.0)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("fp8", 'mixed_precision: expected "no", "bf16" or "fp16" with lowtide, found "fp8"'),
        ("precision", "found false, but mixed_precision='bf16'; there is one compute dtype"),
        ("accumulation", "(Accelerator(gradient_accumulation_steps)), found 4"),
        ("parallelism", "expected only lowtide to divide the model, found a parallelism_config too"),
        ("apart", "expected the optimizer in the same call as its model"),
        ("twice", "expected one optimizer for a model, found 2"),
        ("modes", "expected an optimizer without modes, found ScheduleFree"),
        ("dummy", "a DummyOptim needs an optimizer in the config, found none"),
        ("dummy schedule", "a DummyScheduler needs a scheduler in the config, found none"),
        ("groups", "expected a DummyOptim over parameters, found parameter groups"),
        ("batch", 'expected "auto" or 3 (the data loader), found 5'),
        (
            "compiled twice",
            "compile: found both the section in the config and torch_compile (or a dynamo_backend) in the",
        ),
        ("some", "of them. Pass model.parameters()"),
        ("closure", "optimizer.step(): expected no closure, found one"),
    ],
)
def test_what_cannot_hold_is_an_error(ranks: RankPool, case: str, text: str) -> None:
    (failed,) = ranks.fails(1, refusal, case)
    assert text in failed.text


def test_names_in_docstrings_can_be_imported() -> None:
    names = set(re.findall(r"accelerate(?:\.\w+)+", Accelerator.prepare.__doc__ or ""))
    assert names == {"accelerate.utils.deepspeed.DummyOptim", "accelerate.utils.deepspeed.DummyScheduler"}
    for module, _, name in (name.rpartition(".") for name in names):
        assert hasattr(importlib.import_module(module), name)
