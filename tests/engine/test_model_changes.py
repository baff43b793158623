"""A change of the model behind the engine's back, and a read of a released parameter, are errors with its name."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import handle_torch_function

import lowtide
from tests.kit import models
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import refusal, settings, share_of

Change = Callable[[Any], object]


def change_in_place(model: Any) -> None:
    with torch.no_grad():
        model.norm.bias.add_(1.0)


def change_through_data(model: Any) -> None:
    model.norm.bias.data.add_(1.0)


def change_in_each_forward(model: Any) -> None:
    def change(*_: object) -> None:
        dist.barrier()  # no rank looks at the values before its forward while another rank changes them
        change_through_data(model)

    model.register_forward_pre_hook(change)


def change_in_a_method(self: Any) -> None:
    self.norm.bias.data.mul_(0.5)


def assign_in_a_method(self: Any) -> None:
    self.norm.bias.data = self.norm.bias.data * 0.5


def change_first_row_through_data(model: Any) -> None:
    model.embedding.weight.data[0] = 0.0


def change_and_step(change: Change, stage: int, config: dict[str, Any] | None = None, is_classic: bool = False) -> None:
    model: Any = models.tiny_gpt()
    model.position.requires_grad_(False)
    with lowtide.initialize(model, settings(stage, **(config or {}))) as engine:
        batch = share_of(models.token_batch(0, 2 * engine.world_size))
        engine.train_step(batch)
        change(model)
        engine(*batch) if is_classic else engine.train_step(batch)


def zeros(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape))


ADDED = "was added or replaced after lowtide.initialize, .* then call initialize again"
MEMORY = r"got new memory \(an assignment to its .data, or .to\(\), .half\(\), ...\), but the engine"
CHANGES: dict[str, tuple[Change, int, str]] = {  # the stage, and what is said
    "added": (lambda model: setattr(model, "extra", zeros(3)), 0, f"'extra' {ADDED}"),
    "replaced": (lambda model: setattr(model.head, "weight", zeros(models.VOCAB, 22)), 3, f"'head.weight' {ADDED}"),
    "tied": (
        lambda model: setattr(model.head, "weight", model.embedding.weight),
        3,
        "'head.weight' was tied to 'embedding.weight' after lowtide.initialize, .*; tie them first",
    ),
    "a tied bias": (
        lambda model: setattr(model.blocks[0].norm, "bias", model.blocks[1].norm.bias),
        0,
        "'blocks.0.norm.bias' was tied to 'blocks.1.norm.bias' after lowtide.initialize",
    ),
    "removed": (
        lambda model: setattr(model, "norm", nn.Identity()),
        3,
        "'norm.weight' was removed from the model after lowtide.initialize, .*; change the model first",
    ),
    "unfrozen": (
        lambda model: model.position.requires_grad_(True),
        3,
        "'position': expected requires_grad=False as at lowtide.initialize, found True; it is in no group",
    ),
    "data assigned": (
        lambda model: setattr(model.norm.bias, "data", torch.ones_like(model.norm.bias)),
        1,
        f"'norm.bias' {MEMORY}",
    ),
    "moved": (lambda model: model.double(), 2, f"'position' {MEMORY}"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_parameter_that_is_not_as_it_was_is_named(name: str) -> None:
    change, stage, text = CHANGES[name]
    for is_classic in (False, True):
        with pytest.raises(ValueError, match=f"parameter {text}"):
            change_and_step(change, stage, is_classic=is_classic)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_block_may_be_wrapped(stage: int) -> None:
    """Another name and another module, and the same parameters."""
    change_and_step(lambda model: model.blocks.insert(1, nn.Sequential(model.blocks.pop(1))), stage, is_classic=True)


BF16 = {"bf16": {"enabled": True}}
IN_PLACE = "parameter 'norm.bias' was changed in place"


@pytest.mark.parametrize(
    ("change", "stage", "config", "text"),
    [
        (change_through_data, 1, BF16, "parameter 'norm.bias' was changed through .data, but"),
        (change_in_each_forward, 2, {}, "parameter 'norm.bias' was changed through .data, but"),
        (change_in_place, 1, {}, IN_PLACE),
        (change_in_place, 2, {}, IN_PLACE),
        (change_in_place, 3, {"communication": {"transport": "shared_memory"}}, "parameter 'norm.bias' is released"),
        (change_in_place, 3, {"communication": {"transport": "sockets"}}, "parameter 'norm.bias' is released"),
        (change_in_a_method, 3, {"communication": {"transport": "sockets"}}, IN_PLACE),
        (assign_in_a_method, 3, {"communication": {"transport": "sockets"}}, "parameter 'norm.bias' got new memory"),
    ],
)
def test_a_change_that_other_ranks_would_not_see_is_named(
    ranks: RankPool, change: Change, stage: int, config: dict[str, Any], text: str
) -> None:
    for failure in ranks.fails(2, change_and_step, change, stage, config):
        kind = "ReleasedParameterError" if "is released" in text else "ValueError"
        assert failure.kind == kind and text in failure.text


@pytest.mark.parametrize("stage", [0, 2])
def test_a_change_of_bf16_weights_is_named_on_one_rank_too(stage: int) -> None:
    assert refusal(change_and_step, change_in_place, stage, BF16) == (
        "parameter 'norm.bias' was changed in place, but its master weights and other ranks do not see it; change "
        "it inside `with engine.gathered(parameter, modify=True):` (zero.GatheredParameters(parameter, "
        "modifier_rank=0) in lowtide.deepspeed)"
    )
    for change in (change_through_data, change_first_row_through_data):
        assert "was changed through .data, but" in refusal(change_and_step, change, stage, BF16)
    change_and_step(lambda model: model.position.data.mul_(0.5), stage, BF16)  # frozen, so it has no master weights


NAME = "blocks.0.weight"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.reads_other_block = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        if self.reads_other_block:
            x = x + self.get_parameter(NAME).sum()
        return x.square().mean()


def assign(param: nn.Parameter) -> None:
    param[0] = 1.0


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "linear": lambda p: functional.linear(torch.ones(1, 5), p),
    "data": lambda p: p.data,
    "index": lambda p: p[0],
    "assignment": assign,
    "cat": lambda p: torch.cat([p, p]),
    "addition from the left": lambda p: torch.ones(5, 5) + p,
    "in place": lambda p: p.add_(1),
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.numpy(force=True),
    "data_ptr": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "dtype": lambda p: p.to(torch.float64),
    "transposed": lambda p: p.T,
    "copy from it": lambda p: torch.zeros(5, 5).copy_(p),
    "deepcopy": copy.deepcopy,
    "by its name alone": lambda p: torch.add(torch.ones(5, 5), other=p),
    "in a mapping": lambda p: handle_torch_function(sum_of, (p,), {"weights": [p]}),
}


def sum_of(weights: Any) -> Tensor:
    raise NotImplementedError


@pytest.mark.parametrize("more", [{}, {"bf16": {"enabled": True}}])
def test_embeddings_that_change_with_the_batch_are_refused(more: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Embedding(4, 2, max_norm=1.0), nn.Linear(2, 1))
    found = refusal(lowtide.initialize, model, settings(0, **more))
    assert found == (
        "model: expected embeddings without max_norm, found '0' with max_norm=1: its forward would shrink rows of "
        "this rank's copy, not of the master weights; normalize the output"
    )


class TensorChunk:
    """Hides a parameter from those who look for it among arguments."""

    def __init__(self, param: nn.Parameter) -> None:
        self.param = param


@pytest.mark.parametrize("transport", ["shared_memory", "sockets"])
@on_ranks(2)
def test_reading_a_released_parameter_is_an_error_that_names_it(transport: str) -> None:
    model = Net()
    with lowtide.initialize(model, settings(3, communication={"transport": transport})) as engine:
        engine.train_step(torch.ones(2, 5))
        param, kind = model.get_parameter(NAME), lowtide.ReleasedParameterError
        found = {name: refusal(read, param, kind=kind) for name, read in READS.items()}
        assert [name for name, text in found.items() if not text.startswith(f"parameter '{NAME}' is released")] == []
        assert "engine.gathered(parameter)" in found["index"] and "engine.state_dict()" in found["deepcopy"]
        text = refusal(model.state_dict, kind=kind)
        words = "To save the model, call engine.state_dict() (module_state_dict() in lowtide.deepspeed) or"
        assert text.startswith(f"parameter '{NAME}' is released") and words in text
        words = "a parameter is released: only its shards exist here, so sum_of cannot read it."
        assert refusal(handle_torch_function, sum_of, (param,), TensorChunk(param), kind=kind).startswith(words)
        shown = f"ReleasedParameter('{NAME}', shape=(5, 5), dtype=torch.float32)"
        assert (tuple(param.shape), param.dtype, param.numel(), param.dim(), len(param)) == (
            (5, 5),
            torch.float32,
            25,
            2,
            5,
        )
        assert repr(param) == str(param) == shown and param.requires_grad and param.is_leaf and param.grad is None
        assert isinstance(param, nn.Parameter) and param in {param}
        for reads in (True, False):
            model.reads_other_block = reads
            assert engine.train_step(torch.ones(2, 5)).loss.isfinite()
        with engine.gathered(param):
            assert torch.isfinite(param).all() and type(param) is nn.Parameter
