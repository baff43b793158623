"""A script gives the losses that it gives with DeepSpeed, which were recorded."""

import json
from typing import Any

import pytest
import torch
from torch import nn

import lowtide.deepspeed as deepspeed
from lowtide.deepspeed.pipe import LayerSpec, PipelineModule
from lowtide.deepspeed.utils import RepeatingLoader
from tests.integrations.deepspeed.scripts import DATA, ROWS, batches, engine_of, layers, train
from tests.ranks import RankPool

RECORDED = json.loads((DATA / "losses.json").read_text())


def losses(stage: int) -> tuple[list[float], dict[str, Any]]:
    rank = deepspeed.comm.get_rank()
    engine = engine_of(stage)
    found = train(engine, rank)
    told = {
        "lr": engine.lr_scheduler.get_last_lr(),
        "counters": (engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps),
        "sizes": engine.get_batch_info(),
        "norm": engine.get_global_grad_norm(),
    }
    engine.destroy()
    return found, told


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_losses_are_those_of_deepspeed(ranks: RankPool, stage: int) -> None:
    found, told = ranks(2, losses, stage)[0]
    assert found == pytest.approx(RECORDED["fp32"], abs=1e-6)
    assert told["lr"] == [0.01]
    assert told["counters"] == (12, 24, 192, 0)
    assert told["sizes"] == (16, ROWS, 2)
    assert told["norm"] == pytest.approx(0.8311, abs=1e-4)


def pipelined() -> tuple[list[float], float]:
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "gradient_clipping": 0.0,
    }
    model = layers()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(ROWS, 8, generator=generator), torch.randn(ROWS, 4, generator=generator)) for _ in range(6)]
    repeated = iter(RepeatingLoader(data))
    found = [engine.train_batch(data_iter=repeated).item() for _ in range(5)]
    evaluated = float(engine.eval_batch(iter(data)))
    assert (engine.global_steps, engine.micro_steps) == (5, 10)
    with pytest.raises(AssertionError, match=r"engine.step\(\): expected engine.train_batch"):
        engine.step()
    engine.destroy()
    return found, evaluated


def test_losses_of_a_pipeline_are_those_of_deepspeed(ranks: RankPool) -> None:
    for found, evaluated in ranks(2, pipelined):
        assert found == pytest.approx(RECORDED["pipeline"], abs=1e-6)
        assert evaluated == pytest.approx(RECORDED["pipeline_eval"], abs=1e-6)


def in_order() -> list[float]:
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": 2}
    config["optimizer"] = {"type": "Adam", "params": {"lr": 1e-2}}
    pieces = batches(0, 4)
    rows = [(x, y) for xs, ys in pieces for x, y in zip(xs, ys, strict=True)]
    found = []
    for data in (None, rows):
        engine, *_ = deepspeed.initialize(model=layers(), training_data=data, config=config)
        given = iter(pieces) if data is None else None
        found += [engine.train_batch(given).item() for _ in range(2)]
        engine.destroy()
    return found


def test_a_pipeline_draws_its_training_data_in_order(ranks: RankPool) -> None:
    for found in ranks(2, in_order):
        assert found[:2] == found[2:]


def calls_of_a_layer(num_stages: int, interval: int) -> list[int]:
    """Of each layer of this rank, in the training of 2 microbatches."""
    model = layers(num_stages)
    config = {"train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": 2, "optimizer": {"type": "Adam"}}
    pipeline = {"seed_layers": True, "activation_checkpoint_interval": interval}
    engine, *_ = deepspeed.initialize(model=model, config={**config, "pipeline": pipeline})
    calls: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda *_, name=name: calls.update({name: calls.get(name, 0) + 1}))
    engine.train_batch(iter(batches(0, 2)))
    engine.destroy()
    return sorted(calls.values())


@pytest.mark.parametrize("num_stages", [1, 2])
def test_the_config_says_which_layers_are_recomputed(ranks: RankPool, num_stages: int) -> None:
    plain, recomputed = (ranks(num_stages, calls_of_a_layer, num_stages, interval) for interval in (0, 1))
    assert sum(map(sum, plain)) == 2 * 6 and sum(map(sum, recomputed)) == 4 * 6


def of_many_classes(num_stages: int) -> list[float]:
    """Losses of a list of layers of which no class is the most frequent."""
    torch.manual_seed(0)
    stem = [LayerSpec(nn.Conv2d, 3, 4, 3), nn.PReLU(), nn.Flatten(), LayerSpec(nn.Linear, 16, 6), torch.tanh]
    model = PipelineModule(
        [*stem, LayerSpec(nn.LayerNorm, 6), LayerSpec(nn.Linear, 6, 5)], num_stages, loss_fn=nn.CrossEntropyLoss()
    )
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "optimizer": {"type": "Adam"}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(2, 3, 4, 4, generator=generator), torch.arange(2)) for _ in range(2)]
    found = [engine.train_batch(iter(data)).item() for _ in range(3)]
    engine.destroy()
    return found


def test_every_layer_of_a_pipeline_module_may_begin_a_stage(ranks: RankPool) -> None:
    whole = ranks(1, of_many_classes, 1)[0]
    assert all(found == pytest.approx(whole, abs=1e-6) for found in ranks(2, of_many_classes, 2))
    assert whole[2] < whole[0]
