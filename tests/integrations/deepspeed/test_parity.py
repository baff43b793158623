"""A script gives the losses that it gives with DeepSpeed, which were recorded."""

import json
import random
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lowtide.deepspeed as deepspeed
from lowtide.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from lowtide.deepspeed.utils import RepeatingLoader
from tests.integrations.deepspeed import scripts
from tests.integrations.deepspeed.scripts import DATA, ROWS, batches, engine_of, layers, train
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.resident import peak_growth
from tests.kit.training import refusal

RECORDED = json.loads((DATA / "losses.json").read_text())


@on_ranks(2)
def test_losses_are_those_of_deepspeed() -> None:
    engine, rank = engine_of(3), deepspeed.comm.get_rank()
    losses = train(engine, rank)
    assert rank or losses == pytest.approx(RECORDED["fp32"], abs=1e-6)
    assert engine.lr_scheduler.get_last_lr() == [0.01]
    assert (engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps) == (12, 24, 192, 0)
    assert engine.get_batch_info() == (16, ROWS, 2)
    assert engine.get_global_grad_norm() == pytest.approx(0.8311, abs=1e-4)
    engine.destroy()


def started(model: Any, data: Any = None, **more: Any) -> Any:
    """An engine of two microbatches."""
    config = {"train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": 2, **more}
    config.setdefault("optimizer", {"type": "Adam", "params": {"lr": 1e-2}})
    return deepspeed.initialize(model=model, training_data=data, config=config)[0]


def drawn(count: int, width: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(ROWS, 8, generator=generator), torch.randn(ROWS, width, generator=generator)) for _ in range(count)
    ]


@on_ranks(2)
def test_losses_of_a_pipeline_are_those_of_deepspeed() -> None:
    optimizer = {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.01}}
    engine, data = started(layers(), optimizer=optimizer, gradient_clipping=0.0), drawn(6)
    repeated = iter(RepeatingLoader(data))
    found = [engine.train_batch(data_iter=repeated).item() for _ in range(5)]
    assert found == pytest.approx(RECORDED["pipeline"], abs=1e-6)
    assert float(engine.eval_batch(iter(data))) == pytest.approx(RECORDED["pipeline_eval"], abs=1e-6)
    assert (engine.global_steps, engine.micro_steps) == (5, 10)
    said = "engine.step(): not available over a pipeline. Call engine.train_batch"
    assert said in refusal(engine.step, kind=AssertionError)
    with torch.no_grad():
        assert "expected gradients to be enabled, found torch.no" in refusal(engine.train_batch, kind=RuntimeError)
    engine.destroy()


@on_ranks(2)
def test_an_iterator_that_ends_within_a_batch_is_an_error_of_all_ranks() -> None:
    """Not a mean over fewer microbatches. A training continues with another iterator."""
    engine, data = started(layers()), drawn(2)
    for count in (0, 1):
        told = f"the iterator given to {{}} ended after {count} of 2 microbatches"
        assert told.format("train_step") in refusal(engine.train_batch, iter(data[:count]))
        assert told.format("eval_batch") in refusal(engine.eval_batch, iter(data[:count]))
    assert torch.isfinite(engine.train_batch(iter(data))) and torch.isfinite(engine.eval_batch(iter(data)))
    engine.destroy()


@on_ranks(2)
def test_a_pipeline_draws_its_training_data_in_order() -> None:
    pieces = batches(0, 4)
    rows = [(x, y) for xs, ys in pieces for x, y in zip(xs, ys, strict=True)]
    found = []
    for data in (None, rows):
        engine = started(layers(), data)
        given = iter(pieces) if data is None else None
        found += [engine.train_batch(given).item() for _ in range(2)]
        engine.destroy()
    assert found[:2] == found[2:]


def calls_of_a_layer(num_stages: int, interval: int) -> int:
    """Of all linear layers of this rank, in the training of 2 microbatches."""
    model, calls = layers(num_stages), [0]
    engine = started(model, pipeline={"seed_layers": True, "activation_checkpoint_interval": interval})
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda *_: calls.append(1))
    engine.train_batch(iter(batches(0, 2)))
    engine.destroy()
    return sum(calls)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_the_config_says_which_layers_are_recomputed(ranks: RankPool, num_stages: int) -> None:
    assert [sum(ranks(num_stages, calls_of_a_layer, num_stages, interval)) for interval in (0, 1)] == [2 * 6, 4 * 6]


def of_many_classes(num_stages: int) -> list[float]:
    """Losses of a list of layers of which no class is the most frequent."""
    torch.manual_seed(0)
    stem = [LayerSpec(nn.Conv2d, 3, 4, 3), nn.PReLU(), nn.Flatten(), LayerSpec(nn.Linear, 16, 6), torch.tanh]
    specs = [*stem, LayerSpec(nn.LayerNorm, 6), LayerSpec(nn.Linear, 6, 5)]
    model = PipelineModule(specs, num_stages, loss_fn=nn.CrossEntropyLoss())
    engine = started(model, train_micro_batch_size_per_gpu=2, optimizer={"type": "Adam"})
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(2, 3, 4, 4, generator=generator), torch.arange(2)) for _ in range(2)]
    found = [engine.train_batch(iter(data)).item() for _ in range(3)]
    engine.destroy()
    return found


def test_every_layer_of_a_pipeline_module_may_begin_a_stage(ranks: RankPool) -> None:
    whole = ranks(1, of_many_classes, 1)[0]
    assert all(found == pytest.approx(whole, abs=1e-6) for found in ranks(2, of_many_classes, 2))
    assert whole[2] < whole[0]


class Odd(nn.Module):
    """It reads a random number and draws by NumPy while it is made, and has tensors beside its parameters."""

    offset: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.normal_(self.linear.weight, std=0.1 + self.linear.weight[0, 0].square().item())
        self.register_buffer("offset", torch.rand(width))
        self.shifts = [torch.rand(width) * np.random.rand()]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x + self.shifts[0])) + self.offset


class Noted(scripts.Block):
    made: ClassVar[list[int]] = []  # the numbers of those that were made with values on this rank

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width)
        if not self.l.weight.is_meta:
            self.made.append(number)


def stages_of(num_stages: int, **options: Any) -> PipelineModule:
    """Layers of which the first and the last are tied."""
    ends = partial(TiedLayerSpec, "ends", nn.Linear, 8, 8)
    middle = [LayerSpec(Noted, 8, number) for number in range(4)]
    odd = [LayerSpec(Odd, 8), LayerSpec(nn.ReLU), nn.LayerNorm(8), LayerSpec(Odd, 8)]
    last = ends(forward_fn=lambda module, x: x @ module.weight.T + module.bias)
    specs = [ends(), torch.tanh, *middle, *odd, last]
    return PipelineModule(specs, num_stages, loss_fn=nn.functional.mse_loss, **options)


def own_layers() -> tuple[list[int], list[str], Tensor]:
    """The numbers of the blocks that were made, the layers of which there are parameters, and the tied weight."""
    Noted.made.clear()
    model = stages_of(2, partition_method="type:Noted")  # which has no effect
    first: Any = model.forward_funcs[0]
    last: Any = model.forward_funcs[-1]
    assert first.module.weight is last.module.weight
    model.half().to("cpu").float()
    said = refusal(model, torch.ones(2, 8))
    assert (
        "called a module of 2 stages, " in said and "has built only its stage" in said and "engine.train_batch" in said
    )
    names = dict.fromkeys(name.split(".")[0] for name, param in model.named_parameters() if not param.is_meta)
    return Noted.made[:], list(names), first.module.weight.detach()


def test_a_rank_builds_the_layers_of_its_own_stage(ranks: RankPool) -> None:
    first, last = ranks(2, own_layers)
    assert (first[0], last[0]) == ([0, 1, 2], [3])
    # Layer 8 is no spec, and layer 0 has the weight of layer 10.
    assert (first[1], last[1]) == (["0", "2", "3", "4", "8"], ["0", "5", "6", "8", "9", "10"])
    assert first[2].equal(last[2])


def built_both_ways(folder: Path, seed_layers: bool, more: dict[str, Any]) -> None:
    """A whole model has the values and losses of the one of which ranks build their stages, and goes on from its
    checkpoint; as many numbers are drawn."""
    data = drawn(4, 8)
    found: list[Any] = []
    whole = mock.patch.object(PipelineModule, "_has_other_stages", return_value=False)
    for context in (nullcontext(), whole):
        torch.manual_seed(0)
        random.seed(deepspeed.comm.get_rank())  # as it is where no script seeds it
        np.random.seed(0)
        with context:
            model = stages_of(2, seed_layers=seed_layers)
        behind = [float(torch.rand(())), np.random.rand(), random.random()]
        assert "must add up to the model's blocks" in refusal(
            started, model, **{**more, "pipeline": {"balance": [1, 1]}}
        )
        engine = started(model, **more)
        states = [engine.lowtide.state_dict()]
        losses = [engine.train_batch(iter(data)).item()]
        engine.save_checkpoint(str(folder / str(context is whole)))
        if context is whole:
            engine.load_checkpoint(str(folder / "False"))
        losses.append(engine.train_batch(iter(data)).item())
        states.append(engine.lowtide.state_dict())
        engine.destroy()
        found.append((behind, losses, states))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("num_ranks", "seed_layers", "more"),
    [(2, True, {"pipeline": {"balance": [1, 8]}}), (4, False, {"zero_optimization": {"stage": 3}})],
)
def test_layers_of_the_own_stage_are_those_of_a_whole_model(
    ranks: RankPool, tmp_path: Path, num_ranks: int, seed_layers: bool, more: dict[str, Any]
) -> None:
    ranks(num_ranks, built_both_ways, tmp_path, seed_layers, more)


class Failing(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        if deepspeed.comm.get_rank() and not self.weight.is_meta:
            raise OSError("no such file")


@on_ranks(2)
@pytest.mark.parametrize("seed_layers", [True, False])
def test_a_layer_that_fails_on_one_rank_fails_on_all(seed_layers: bool) -> None:
    outcomes = (RuntimeError, "PipelineModule failed on rank 1"), (OSError, "no such file")
    kind, said = outcomes[deepspeed.comm.get_rank()]
    specs = [LayerSpec(Failing) for _ in range(2)]
    assert said in refusal(PipelineModule, specs, 2, seed_layers=seed_layers, kind=kind)


@on_ranks(2)
def test_a_rank_has_memory_for_its_own_stage_alone() -> None:
    peak = peak_growth(lambda: PipelineModule([LayerSpec(nn.Linear, 1024, 1024) for _ in range(16)], 2))
    assert peak < (32 + 6) << 20  # the model has 64 MiB, a layer 4
