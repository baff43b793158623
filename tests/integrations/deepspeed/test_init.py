"""`zero.Init`: what is made in it is divided, and has the values that it has without it."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide.deepspeed as deepspeed
from lowtide.deepspeed.pipe import PipelineModule
from lowtide.deepspeed.runtime.zero.partition_parameters import Init, ZeroParamStatus
from lowtide.zero.released import ReleasedParameter
from tests.integrations.deepspeed import scripts
from tests.kit.ranks import on_ranks
from tests.kit.resident import peak_growth
from tests.kit.training import refusal


class Busy(nn.Module):
    """Its constructor reads, writes, copies, ties and replaces parameters of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.a = nn.Linear(8, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)  # makes deep copies
        self.c = nn.Linear(16, 4)
        self.apply(self._draw)
        nn.init.zeros_(self.c.weight)
        self.c.weight.data[:, 1:3].add_(0.25)
        self.scale = nn.Parameter(self.a.weight.detach().mean())
        for name, param in self.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(param, std=float(self.c.weight.detach().sum()) / 100)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.view = self.c.bias.data[:2]

    def _draw(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0, 0.1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.a(x)) + self.embedding.weight[:1]
        x = self.encoder(x[:, None])[:, 0]
        return functional.mse_loss(self.c(x) * self.scale, y) + self.head(x).square().mean()


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_made_in_init_has_the_values_of_a_plain_one(stage: int) -> None:
    rank = deepspeed.comm.get_rank()
    made = []
    for enabled in (False, True):
        torch.manual_seed(rank)
        again = deepspeed.zero.Init(enabled=enabled)
        with deepspeed.zero.Init(config_dict_or_path=scripts.config(3), enabled=enabled), again:
            made.append(Busy())
    plain, divided = made
    assert [name for name, param in divided.named_parameters() if type(param) is nn.Parameter] == ["c.bias"]  # a view
    assert all(deepspeed.zero.is_zero_param(param) for param in divided.parameters())
    assert not any(isinstance(param, ReleasedParameter) for param in plain.parameters())
    if rank == 0:
        assert torch.equal(plain.view, divided.view)
    config = scripts.config(stage)
    wrong = {**config, "optimizer": {"type": "Adam", "params": {"lr": -1}}}
    assert "optimizer" in refusal(deepspeed.initialize, model=divided, config=wrong)
    values = {name: value.clone() for name, value in divided.state_dict().items()}
    engines = [deepspeed.initialize(model=model, config=config)[0] for model in made]
    if rank == 0:
        torch.testing.assert_close(values, plain.state_dict() if stage < 3 else values, rtol=0, atol=0)
    assert scripts.train(engines[0], rank, 4) == scripts.train(engines[1], rank, 4)
    for engine in engines:
        engine.destroy()


@on_ranks(2)
def test_parameters_of_init_are_gathered_and_set() -> None:
    rank = deepspeed.comm.get_rank()
    torch.manual_seed(0)
    expected = nn.Linear(16, 16).weight.detach().clone()
    torch.manual_seed(0)
    with deepspeed.zero.Init(remote_device="cpu", pin_memory=True):
        model = nn.Linear(16, 16)
        bias: Any = model.bias
        with deepspeed.zero.GatheredParameters(bias, modifier_rank=1):
            if rank == 1:
                bias.data.fill_(3.0)
    weight: Any = model.weight
    assert (weight.ds_numel, weight.ds_shape, weight.ds_status) == (256, (16, 16), ZeroParamStatus.NOT_AVAILABLE)
    with deepspeed.zero.GatheredParameters(model.parameters()), deepspeed.zero.GatheredParameters([weight]):
        assert weight.ds_status == ZeroParamStatus.AVAILABLE and not hasattr(nn.Linear(2, 2).weight, "ds_id")
        assert torch.equal(model.weight, expected) and bias.sum() == 48
    with pytest.raises(AssertionError, match=r"of shape \(16,\) was changed on rank 1 without a modifier"):  # noqa: SIM117
        with deepspeed.zero.GatheredParameters(bias):
            if rank == 1:
                bias.data.zero_()
    copied = copy.deepcopy(model)
    assert torch.equal(copied.weight, expected)
    with torch.no_grad():
        model.weight.mul_(2.0)  # on all ranks, after Init
    model.load_state_dict({"weight": model.state_dict()["weight"] + 1, "bias": torch.ones(16)})
    deepspeed.zero.Init(module=copied)
    assert isinstance(copied.weight, ReleasedParameter)
    with deepspeed.zero.GatheredParameters(model.parameters()):
        assert torch.equal(model.weight, expected * 2 + 1)
    with pytest.raises(AssertionError, match=r"rank 0 opens number 0 of shape \(16, 16\) while rank 1 opens number 1"):
        (copied.bias if rank else copied.weight).sum()


@on_ranks(2)
def test_init_without_effect_and_refused() -> None:
    for init in (Init(config_dict_or_path=scripts.config(2)), Init(enabled=False), Init(config=scripts.config(0))):
        with init:
            assert type(nn.Linear(2, 2).weight) is nn.Parameter
    with Init(dtype=torch.float16, enabled=True):
        assert nn.Linear(2, 2).weight.dtype == torch.float16
    assert nn.Linear(2, 2).weight.dtype == torch.float32
    for option in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "param_swapper"):
        with pytest.raises(NotImplementedError, match=f"zero.Init: expected no {option}, found True"):
            Init(**{option: True})
    groups = [deepspeed.comm.new_group([rank]) for rank in range(2)]
    with pytest.raises(NotImplementedError, match=r"expected a data_parallel_group of all 2 ranks, found one of 1"):
        Init(data_parallel_group=groups[deepspeed.comm.get_rank()])


@on_ranks(2)
def test_no_rank_ever_holds_a_model_made_in_init() -> None:
    def make() -> None:
        with deepspeed.zero.Init():
            layers = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(64)])
            for param in layers.parameters():
                nn.init.ones_(param)

    assert peak_growth(make) < (64 // 2 + 20) << 20  # its parts, what is open, a message; the model has 64 MiB


@on_ranks(2)
def test_layers_of_a_pipeline_may_be_made_in_init() -> None:
    found = []
    for enabled in (False, True):
        with deepspeed.zero.Init(enabled=enabled):
            model: PipelineModule = scripts.layers()
        config = scripts.config(3)
        del config["scheduler"]
        engine = deepspeed.initialize(model=model, config=config)[0]
        found.append(float(engine.train_batch(iter(scripts.batches(0, 2)))))
        engine.destroy()
    assert found[0] == found[1]
