"""What a user can do wrong, and the text that says so; a NaN is named with parameter and rank."""

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.engine.step.batch import ModelCall
from lowtide.engine.step.step_sums import NonFiniteGradientError, non_finite_error
from lowtide.zero.gradient_reducer import GradientStats
from tests.kit.models import linear_chain
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import differences, refusal, settings

CONFIG = settings()
HALF = {"gradient_predivide_factor": 2.0}


class Net(nn.Module):
    """Two blocks and a head; the loss is the output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        loss: Tensor = self.head(x).square().mean()
        return loss


class ReadElsewhere(Net):
    """A block's weight is read outside of its forward, in a reentrant checkpoint: its gradient comes in two parts."""

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda h: h * self.get_parameter("blocks.1.weight").sum(), self.blocks[0](x), use_reentrant=True)
        loss: Tensor = self.head(self.blocks[1](x)).square().mean()
        return loss


class Widened(Net):
    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.head(self.blocks[0](x).float()).sum()
        return loss


def quantized() -> nn.Module:
    linear = nn.Linear(2, 2)
    linear.weight = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.ones(2, 2)), requires_grad=False)
    return linear


def with_shared_memory() -> nn.Module:
    weight = torch.ones(2, 3)
    return nn.ParameterList([nn.Parameter(weight), nn.Parameter(weight.t())])


def initialize(model: Any = None, **more: Any) -> lowtide.Engine:
    """more: sections of the config; those of None leave."""
    return lowtide.initialize(Net() if model is None else model, settings(**more))


def step_on(rows: int, model: Any = None, **more: Any) -> None:
    initialize(model, **more).train_step((torch.randn(rows, 4),))


def step_on_integers(precision: str, call_it: bool) -> None:
    engine = initialize(stage=3, **{precision: {"enabled": True}})
    rows = torch.ones(2, 4, dtype=torch.uint8)
    if call_it:
        engine(x=rows)
    engine.train_step((rows,))


def train_on_iterator_with_rows(*rows: int) -> None:
    initialize(gradient_accumulation_steps=3).train_step(iter([(torch.randn(count, 4),) for count in rows]))


def call_backward_past_the_engine() -> None:
    """As from C++, where nobody is told of its beginning."""
    loss = initialize(gradient_predivide_factor=2.0).module(torch.randn(2, 4))
    run = torch.autograd.Variable._execution_engine.run_backward
    run((loss,), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def backward_of(make: Callable[[lowtide.Engine], Any]) -> None:
    engine = initialize(stage=3)
    engine.backward(make(engine))


def without_gradient(engine: lowtide.Engine) -> Tensor:
    with torch.no_grad():
        loss: Tensor = engine(torch.randn(2, 4))
        return loss


def incomplete_launch() -> None:
    os.environ |= {"RANK": "0", "MASTER_ADDR": "localhost"}
    initialize()


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "wrong rows": (
        lambda: step_on(3),
        "ValueError: batch: expected 2 rows on this rank = train_micro_batch_size_per_gpu(2) x "
        "gradient_accumulation_steps(1), found 3.",
    ),
    "rows from an iterator": (
        lambda: train_on_iterator_with_rows(2, 3),
        "ValueError: batch: expected microbatches of 2 rows (train_micro_batch_size_per_gpu) from the "
        "iterator given to train_step, found 3 in microbatch 1.",
    ),
    "uneven tensors": (
        lambda: initialize().train_step((torch.randn(2, 4), torch.ones(3))),
        "ValueError: batch: expected tensors of the same size along dimension 0, found sizes [2, 3]; train_step splits",
    ),
    "rows that do not divide": (
        lambda: step_on(5, train_micro_batch_size_per_gpu=None, gradient_accumulation_steps=3),
        "ValueError: batch: expected a number of rows that gradient_accumulation_steps (3) divides, found 5",
    ),
    "loss of another engine": (
        lambda: initialize(**HALF).backward(initialize(**HALF)(torch.randn(2, 4))),
        "StateError: engine.backward(loss): expected a loss of this engine, found the output of another engine; call",
    ),
    "empty model": (
        lambda: initialize(nn.Identity()),
        "ValueError: model: expected a module with parameters, found Identity without any",
    ),
    "nothing to train": (
        lambda: initialize(lambda: Net().requires_grad_(False)),
        "ValueError: model: expected a parameter that requires a gradient, found 6 parameters that do not; "
        "call requires_grad_(True) on the parameters to train",
    ),
    "complex parameters": (
        lambda: initialize(nn.Linear(4, 1, dtype=torch.complex64)),
        "ValueError: model: expected real parameters, found complex parameters weight, bias; store them as a real "
        "tensor with a last dimension of 2 and use torch.view_as_complex in forward",
    ),
    "quantized parameters": (
        lambda: initialize(quantized()),
        "ValueError: model: expected parameters with plain values, found 'weight' of class TwoTensor; a flat buffer "
        "cannot hold it: pass initialize the model before it is quantized or distributed",
    ),
    "two parameters with the same memory": (
        lambda: initialize(with_shared_memory()),
        "ValueError: model: expected parameters with memory of their own, found '1' in the memory of '0'; assign the "
        "parameter itself to tie them (b.weight = a.weight), or clone the tensor",
    ),
    "a lazy model": (
        lambda: initialize(nn.Sequential(nn.LazyLinear(1))),
        "ValueError: model: expected parameters with shapes, found '0.weight' of a lazy module; call the model on a "
        "batch before initialize",
    ),
    "a compiled model": (
        lambda: initialize(torch.jit.ScriptModule()),
        "ValueError: model: expected a Python module, found a ScriptModule without hooks; pass initialize the "
        "module before torch.jit",
    ),
    "no optimizer": (
        lambda: initialize(optimizer=None, gradient_clipping=1.0),
        "ValueError: optimizer: gradient_clipping needs an optimizer, found none; set it in the config, for example "
        '{"type": "adamw", "params": {"lr": 1e-3}}, or pass it to initialize(..., optimizer=...)',
    ),
    "two optimizers": (
        lambda: lowtide.initialize(Net(), CONFIG, optimizer=torch.optim.SGD),
        'ValueError: optimizer: expected a single optimizer, found "adamw" in the config and another passed to '
        "initialize; remove either (a preset has an optimizer: write its remaining keys)",
    ),
    "a list of optimizers": (
        lambda: lowtide.initialize(Net(), {}, optimizer=[torch.optim.SGD, torch.optim.AdamW]),  # type: ignore[arg-type]
        "ValueError: optimizer: expected a single optimizer, found a list of 2; use an optimizer with a group for each",
    ),
    "loss.backward()": (
        call_backward_past_the_engine,
        "StateError: loss.backward(): expected a loss of the output of engine(...), which has the factor 0.5 of "
        "float16's loss scale (or prescale_gradients, gradient_predivide_factor), found a loss without it: call "
        "engine(...) for the forward, or `engine.scale(loss).backward()`",
    ),
    "integers where floats are wanted": (
        lambda: step_on_integers("bf16", False),
        "ValueError: batch: expected torch.bfloat16 for 'blocks.0' (Linear), the dtype of its weight, found "
        "torch.uint8 of shape (2, 4). With auto_cast true the engine casts floating-point tensors of a batch, but no "
        "integers, since these may be indices: pass values as floats, for example x.float(). torch says: mat1 "
        "and mat2 must have the same dtype",
    ),
    "integers in a call": (
        lambda: step_on_integers("fp16", True),
        "ValueError: batch: expected torch.float16 for 'blocks.0' (Linear), the dtype of its weight, found torch.uint8",
    ),
    "floats of another dtype within the model": (
        lambda: step_on(2, Widened(), bf16={"enabled": True}),
        "ValueError: batch: expected torch.bfloat16 for 'head' (Linear), the dtype of its weight, found "
        "torch.float32 of shape (2, 4). With auto_cast true the engine casts floating-point tensors of a batch, but no "
        "values that the model makes: cast these before the layer, for example x.to(torch.bfloat16). torch says: mat1",
    ),
    "wrong width": (
        lambda: initialize().train_step((torch.randn(2, 5),)),
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x5 and 4x4)\nin the forward of 'blocks.0', "
        "Linear(in_features=4, out_features=4, bias=True), which was given (torch.float32 of shape (2, 5))",
    ),
    "wrong width in a call": (
        lambda: initialize()(x=torch.randn(2, 5)),
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x5 and 4x4)\nin the forward of 'blocks.0', ",
    ),
    "an argument too many": (
        lambda: initialize()(x=torch.randn(2, 4), y=torch.randn(2, 4)),
        "unexpected keyword argument 'y'\nin the forward of the model, Net, which was given (x=torch.float32 of shape "
        "(2, 4), y=torch.float32 of shape (2, 4))",
    ),
    "loss without gradient": (
        lambda: backward_of(without_gradient),
        "ValueError: backward: expected a loss with a single element that requires a gradient, found a tensor of "
        "shape (), requires_grad=False; was it computed under torch.no_grad(), or detached?",
    ),
    "loss in a mapping": (
        lambda: backward_of(lambda engine: {"loss": engine(torch.randn(2, 4))}),
        "ValueError: backward: expected a loss with a single element that requires a gradient, found a mapping "
        "with keys ['loss']",
    ),
    "half a launcher": (
        incomplete_launch,
        "ValueError: the launcher's environment is incomplete: found RANK, MASTER_ADDR; missing WORLD_SIZE, "
        "MASTER_PORT. Start the script with `lowtide launch` or torchrun, or set all four, or none to "
        "run a single process.",
    ),
    "parameter of another model": (
        lambda: initialize().gathered(nn.Parameter(torch.zeros(1))).__enter__(),
        "ValueError: gathered: expected parameters of the engine's module, found 1 that are not; pass the "
        "parameters themselves",
    ),
    "gradient that comes late": (
        lambda: step_on(2, ReadElsewhere()),
        "StateError: parameter 'blocks.1.weight' got a gradient after its unit 'blocks.1' had been reduced in the same "
        "backward. This happens if reentrant activation checkpointing recomputes a read outside of the unit's forward: "
        "use use_reentrant=False, or leave the unit out of zero_optimization.units.",
    ),
}


def make_all_mistakes() -> dict[str, str]:
    """Class and text of the error that each gives, where no launcher has started the process."""
    found = {}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    environment = dict(os.environ)
    for name, (make, _) in MISTAKES.items():
        try:
            make()
            found[name] = "nothing"
        except Exception as error:
            found[name] = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)
    return found


def test_each_mistake_has_its_text(ranks: RankPool) -> None:
    [found] = ranks(1, make_all_mistakes, process_group=False)
    for name, (_, text) in MISTAKES.items():
        assert text in found[name], (name, found[name])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_inputs_of_every_floating_point_dtype_are_cast(dtype: torch.dtype) -> None:
    model_call = ModelCall(None, None, None, Mock(device=torch.device("cpu")), torch.bfloat16, None)
    given = torch.ones(2, dtype=dtype), torch.ones(2).long()
    values, indices = model_call.prepared(given, lambda tensor: tensor)
    assert (values.dtype, indices.dtype) == (torch.bfloat16, torch.int64)


STAGES = (0, 3)


def engine_with_fault(stage: int, transport: str, value: float, step: int, rank: int, **more: Any) -> lowtide.Engine:
    """An engine whose gradient of blocks.1.weight has `value` at one place, in that step on that rank."""
    torch.manual_seed(0)
    model = linear_chain(40, 3)
    optimizer = {"type": "sgd", "params": {"lr": 0.1}}
    more |= {"gradient_clipping": 1.0, "optimizer": optimizer, "communication": {"transport": transport}}
    engine = lowtide.initialize(model, settings(stage, **more))

    def spoil(gradient: Tensor) -> Tensor | None:
        if engine.global_step != step or engine.rank != rank:
            return None
        spoiled = gradient.clone()
        spoiled[39, 7] = value
        return spoiled

    model.get_parameter("blocks.1.weight").register_hook(spoil)
    return engine


@pytest.mark.parametrize(
    ("transport", "world_size", "rank"),
    [("sockets", 1, 0), ("sockets", 2, 1), ("shared_memory", 3, 2), ("native", 2, 1)],
)
@on_ranks("world_size")
def test_a_nan_is_named_with_parameter_rank_and_step(transport: str, world_size: int, rank: int) -> None:
    """By the native transport only the sum is seen, and so no rank is named."""
    producer = "the sum over ranks" if transport == "native" else f"rank {rank}"
    for stage in STAGES:
        with engine_with_fault(stage, transport, (torch.nan, torch.inf)[(stage + rank) % 2], 2, rank) as engine:
            x = torch.randn(2, 40)
            for _ in range(2):
                engine.train_step((x,))
            before = engine.state_dict()
            assert refusal(engine.train_step, (x,), kind=NonFiniteGradientError).startswith(
                "step 3: expected finite gradients, found a NaN or infinite value in the gradient of 'blocks.1.weight' "
                f"on {producer}. No parameter was updated."
            )
            assert differences(before, engine.state_dict()) == []


def test_a_finite_gradient_whose_square_is_not_is_named_too() -> None:
    """Its norm would be infinite, or wrong."""
    with lowtide.initialize(torch.nn.Linear(4, 1).double(), settings()) as engine:
        engine.backward(engine(torch.ones(1, 4, dtype=torch.float64)).sum() * 1e160)
        with pytest.raises(NonFiniteGradientError) as caught:
            engine.step()
        unseen = str(non_finite_error(engine._mesh, (), 2, "No parameter was updated."))
    assert "found 1.0e+160, whose square is not, in the gradient of 'weight' on rank 0" in str(caught.value)
    assert unseen.startswith("step 3: expected finite gradients, found a sum of squares that is not finite")


def test_what_another_stage_adds_to_a_tied_weight_is_not_this_ranks() -> None:
    group = Mock(full=torch.zeros(4), own=slice(0, 4))
    group.axes.states = group.axes.replicas = Mock(size=1, rank=0, ranks=(0,))
    stats = GradientStats(group)
    stats.look(group.axes.states, 0, torch.zeros(4), (), counts=False)
    assert stats.first(torch.zeros(4), is_own=True) is None
    total = torch.tensor([0.0, float("nan"), 0.0, 0.0])
    stats.look(group.axes.states, 0, total, (), counts=True)
    found = stats.first(total, is_own=False)
    assert found is not None and found.rank is None
