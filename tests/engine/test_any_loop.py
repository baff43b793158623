"""Loops as people write them train as in plain torch: `loss.backward()`, in any number, of any graph."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.engine.step.steps import NO_BACKWARD, NO_GRADIENT
from lowtide.zero.sequence import StateError
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import differences, refusal

WIDTH = 6
STEPS = 2
OPTIMIZER: dict[str, Any] = {"type": "sgd", "params": {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.1}}


class Plain:
    """Plain torch under the names of an engine."""

    def __init__(self, model: nn.Module) -> None:
        self.module = model
        self._trained = [param for param in model.parameters() if param.requires_grad]
        self._optimizer = torch.optim.SGD(self._trained, **OPTIMIZER["params"])

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def zero_grad(self) -> None:
        self.module.zero_grad()

    @contextmanager
    def frozen(self) -> Any:
        for param in self._trained:
            param.requires_grad_(False)
        yield
        for param in self._trained:
            param.requires_grad_(True)

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.module.state_dict())


Make = Callable[[nn.Module], Any]  # an engine, or `Plain`
Data = Callable[[int], Sequence[Tensor]]
Loop = Callable[[Make, Data], list[Any]]
Loss = Callable[[Any, Tensor], Tensor]  # of a model that is trained, and a batch


def net(inputs: int = WIDTH, outputs: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 8),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.Softplus(),
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.Linear(8, outputs),
    )


def mean(losses: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(losses)).mean()


def square(model: Any, x: Tensor) -> Tensor:
    found: Tensor = model(x).square().mean()
    return found


class Forces(nn.Module):
    """An energy, and its gradient by the positions, as models of molecules have it."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = net()
        self.scale = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.energy(x)
            (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=torch.is_grad_enabled())
        return self.scale(energy), forces


def gradient_inside_of_the_forward(model: Any, x: Tensor) -> Tensor:
    energy, forces = model(x)
    loss: Tensor = energy.square().mean() + (forces - x).square().mean()
    return loss


class Recomputed(nn.Module):
    """Blocks under reentrant checkpointing: one by one, one several times in a region, and regions in regions."""

    def __init__(self, blocks_alone_are_trained: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.last = nn.Linear(8, 1)
        if blocks_alone_are_trained:
            self.first.requires_grad_(False)
            self.last.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        a, b, c, d = self.blocks

        def twice(h: Tensor) -> Any:
            return b(b(h)) + checkpoint(c, h, use_reentrant=True)

        x = self.first(x)
        x = x if x.requires_grad else x.requires_grad_()  # as transformers' enable_input_require_grads
        x = checkpoint(a, x, use_reentrant=True)
        x = checkpoint(twice, x, use_reentrant=True)
        x = checkpoint(lambda h: d(checkpoint(a, h, use_reentrant=False)), x, use_reentrant=False)
        return self.last(x)


def blocks_called_alone(model: Any, x: Tensor) -> Tensor:
    """Without the forward of the whole."""
    for layer in model.module:
        x = layer(x)
    return x.square().mean()


def weighted_by_own_gradients(model: Any, x: Tensor) -> Tensor:
    """GradNorm: losses are weighed by gradients of a layer that `torch.autograd.grad` gives."""
    y, last = model(x), model.module.get_parameter("6.weight")
    parts: tuple[Tensor, Tensor] = (y.square().mean(), y.abs().mean())
    norms = [torch.autograd.grad(part, last, retain_graph=True)[0].norm() for part in parts]
    return parts[0] / (0.1 + norms[0]) + parts[1] * norms[1]


class Parts(nn.Module):
    """Methods that read a parameter of its own, a weight of another module and a computed one; None in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(WIDTH))
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.more = nn.ModuleList([nn.Linear(WIDTH, WIDTH), None])  # type: ignore[list-item]  # as diffusers has it
        nn.utils.parametrizations.weight_norm(self.blocks[1])
        self.head = nn.Linear(WIDTH, 1)

    def encode(self, x: Tensor) -> Tensor:
        x = x + self.position
        for block in self.blocks:
            x = torch.tanh(block(x))
        for part in self.more:
            x = x if part is None else part(x)
        return x

    def project(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.head.weight, self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.encode(x)) + self.get_parameter("blocks.2.weight").square().mean()


def methods(model: Any, x: Tensor) -> Tensor:
    """Called without the forward of the whole, and beside it; one with other values in place of a parameter's."""
    encoded = model.module.encode(x)
    with torch.no_grad():
        target = model.module.project(model.module.encode(x + 1))
    other = torch.func.functional_call(model.module, {"position": torch.ones(WIDTH)}, (x,))
    loss: Tensor = (model.module.project(encoded) - target).square().mean() + other.mean() + model(x).abs().mean()
    return loss


# A model and its loss; the mean over the batches of a step has one backward.
OF_ONE_LOSS: tuple[tuple[Callable[[], nn.Module], Loss], ...] = (
    (Forces, gradient_inside_of_the_forward),
    (partial(Recomputed, False), square),
    (partial(Recomputed, True), square),
    (net, blocks_called_alone),
    (net, weighted_by_own_gradients),
    (Parts, methods),
)


def one_loss(build: Callable[[], nn.Module], loss: Loss, make: Make, data: Data) -> list[Any]:
    model = make(build())
    for step in range(STEPS):
        mean([loss(model, x) for x in data(step)]).backward()
        model.step()
    return [model]


def gradient_of_an_output(make: Make, data: Data) -> list[Any]:
    """A backward that begins with a tensor and its gradient."""
    model = make(net())
    for step in range(STEPS):
        batches = data(step)
        for x in batches:
            y = model(x)
            y.backward(torch.ones_like(y) / (len(batches) * len(x)))
        model.step()
    return [model]


def two_forwards_two_backwards(make: Make, data: Data) -> list[Any]:
    """In the order of the forwards, and in the other one."""
    model = make(net())
    for step in range(STEPS):
        pairs = [(model(x).square().mean(), model(2 * x).abs().mean()) for x in data(step)]
        losses = [mean(list(part)) for part in zip(*pairs, strict=True)]
        for loss in losses if step % 2 else reversed(losses):
            loss.backward()
        model.step()
    return [model]


class SharedTrunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = net(outputs=8)
        self.actor, self.critic = nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[torch.distributions.Categorical, Tensor]:
        hidden = self.trunk(x)
        return torch.distributions.Categorical(logits=self.actor(hidden)), self.critic(hidden).squeeze(1)


def actor_and_critic(make: Make, data: Data) -> list[Any]:
    """PPO: the clipped ratio, a value loss and an entropy bonus; each by a backward of its own."""
    model = make(SharedTrunk())
    for step in range(STEPS):
        policy, value = [], []
        for x in data(step):
            actions = torch.arange(len(x)) % 3
            with torch.no_grad():
                old, baseline = model(x)
            for _ in range(2):
                now, values = model(x)
                ratio = (now.log_prob(actions) - old.log_prob(actions) + 0.3).exp()
                advantage = x[:, 0] - baseline
                policy.append(-torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean())
                value.append((values - x.sum(1)).square().mean() - 0.01 * now.entropy().mean())
        mean(policy).backward(retain_graph=True)
        mean(value).backward()
        model.step()
    return [model]


def dcgan(make: Make, data: Data) -> list[Any]:
    """As the tutorial: two backwards of the critic, then one through it, whose gradients of its own are dropped."""
    generator, critic = make(net(outputs=WIDTH)), make(net())
    bce = functional.binary_cross_entropy_with_logits
    for step in range(STEPS):
        critic.zero_grad()
        reals = data(step)
        fakes = [generator(x.flip(0)) for x in reals]
        mean([bce(critic(x), torch.ones(len(x), 1)) for x in reals]).backward()
        mean([bce(critic(fake.detach()), torch.zeros(len(fake), 1)) for fake in fakes]).backward()
        critic.step()
        generator.zero_grad()
        mean([bce(critic(fake), torch.ones(len(fake), 1)) for fake in fakes]).backward()
        generator.step()
    critic.zero_grad()
    return [generator, critic]


def frozen_critic(after_its_forward: bool, make: Make, data: Data) -> list[Any]:
    """after_its_forward: autograd comes to its parameters, and adds nothing to them."""
    generator, critic = make(net(outputs=WIDTH)), make(net())
    for step in range(STEPS):
        with nullcontext() if after_its_forward else critic.frozen():
            loss = mean([-critic(generator(x)).mean() for x in data(step)])
            with critic.frozen() if after_its_forward else nullcontext():
                loss.backward()
        generator.step()
        mean([(critic(x) - critic(generator(x).detach())).square().mean() for x in data(step)]).backward()
        critic.step()
    return [generator, critic]


def penalty(critic: Any, x: Tensor) -> Tensor:
    """Of the slope at x."""
    x = x.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def cleared_after_the_forward(make: Make, data: Data) -> list[Any]:
    critic = make(net())
    for step in range(STEPS):
        loss = mean([penalty(critic, x) for x in data(step)])
        critic.zero_grad()
        loss.backward()
        critic.step()
    return [critic]


def counted_by_hand(make: Make, data: Data) -> list[Any]:
    """Steps of one and of two microbatches."""
    model = make(net())
    for step in range(STEPS):
        for index in range(step + 1):
            with model.accumulate(last=index == step):
                mean([square(model, x + index) for x in data(step)]).backward()
            if index < step and not isinstance(model, Plain):
                assert model.step() is model.step()  # nothing happens
        model.step()
    return [model]


def methods_twice(make: Make, data: Data) -> list[Any]:
    """Two backwards a step, cleared in between at times, which begin with the gradient of a parameter."""
    model = make(Parts())
    for step in range(STEPS):
        for again in range(2):
            loss = mean([model.module.project(model.module.encode(x + again)).square().mean() for x in data(step)])
            if again and step:
                model.module.zero_grad()
            loss.backward()
        model.step()
    return [model]


def blocks_after_an_error(make: Make, data: Data) -> list[Any]:
    model = make(net())
    for step in range(STEPS):
        hook = model.module.get_parameter("0.weight").register_hook(lambda gradient: 1 / 0)
        with suppress(ZeroDivisionError):
            mean([square(model, x) for x in data(step + 1)]).backward()
        hook.remove()
        if isinstance(model, Plain):
            model.zero_grad()
        mean([blocks_called_alone(model, x) for x in data(step)]).backward()
        model.step()
    return [model]


LOOPS: tuple[Loop, ...] = (
    *(partial(one_loss, build, loss) for build, loss in OF_ONE_LOSS),
    gradient_of_an_output,
    two_forwards_two_backwards,
    actor_and_critic,
    dcgan,
    partial(frozen_critic, False),
    partial(frozen_critic, True),
    counted_by_hand,
    methods_twice,
    cleared_after_the_forward,
    blocks_after_an_error,
)
# Past what the engine has returned, which is multiplied; and gradients of its own that autograd.grad gives are too.
PAST_THE_FACTOR = (
    "blocks_called_alone",
    "methods",
    "methods_twice",
    "blocks_after_an_error",
    "weighted_by_own_gradients",
)


def name_of(loop: Any) -> str:
    """With what a `partial` has."""
    if not isinstance(loop, partial):
        return str(loop.__name__)
    return loop.args[1].__name__ if loop.func is one_loss else f"{loop.func.__name__} {loop.args}"


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def run_plainly(loop: Loop, world_size: int) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    trained = loop(Plain, lambda step: [batch(step, rank) for rank in range(world_size)])
    return [one.state_dict() for one in trained]


def run(loop: Loop, config: dict[str, Any]) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    engines: list[lowtide.Engine] = []

    def make(model: nn.Module) -> lowtide.Engine:
        engines.append(lowtide.initialize(model, {"optimizer": OPTIMIZER, **config}))
        return engines[-1]

    trained = loop(make, lambda step: [batch(step, engines[0].rank)])
    states = [one.state_dict() for one in trained]
    for engine in engines:
        engine.close()
    return states


CHOSEN = {  # for loops that take turns; of two ranks, every second loop is on each transport
    "solo": ("all in files", "speculating", "predivided"),
    "shared_memory": ("stage 3", "stage 1", "stage 3", "each rank its own shards"),
    "sockets": ("stage 0", "stage 2", "stage 3"),
}


def config_of(transport: str, folder: Path, number: int, loop: str) -> tuple[str, dict[str, Any]]:
    """What the loop of this number is run with, and its name."""
    files = {"device": "nvme", "nvme_path": str(folder)}
    sections: dict[str, dict[str, Any]] = {
        **{f"stage {stage}": {"stage": stage} for stage in range(4)},
        "all in files": {"stage": 3, "offload_optimizer": files, "offload_param": files},
        "speculating": {"stage": 1, "offload_optimizer": {**files, "overlap": "speculative"}},
        "predivided": {"stage": 3},
        "each rank its own shards": {"stage": 2, "shard_size": 1},
    }
    kind = CHOSEN[transport][number % len(CHOSEN[transport])]
    # Between its backwards `methods_twice` would see what is tried.
    if (kind, loop) == ("speculating", "methods_twice") or (kind == "predivided" and loop in PAST_THE_FACTOR):
        kind = "all in files"
    config: dict[str, Any] = {"zero_optimization": sections[kind]}
    if kind == "predivided":
        config["gradient_predivide_factor"] = 4.0
    if transport != "solo":
        config["communication"] = {"transport": transport}
    return kind, config


def loops_of(transport: str) -> tuple[Loop, ...]:
    return LOOPS if transport == "solo" else LOOPS[transport == "sockets" :: 2]


def run_all(transport: str, folder: Path) -> list[tuple[str, list[dict[str, Tensor]]]]:
    """Of each loop: with what it is run, and the states."""
    found = []
    for number, loop in enumerate(loops_of(transport)):
        kind, config = config_of(transport, folder, number, name_of(loop))
        found.append((kind, run(loop, config)))
    return found


@pytest.mark.parametrize("transport", ["solo", "shared_memory", "sockets"])
def test_every_loop_trains_as_in_plain_torch(ranks: RankPool, transport: str, tmp_path: Path) -> None:
    world_size = 1 if transport == "solo" else 2
    found = ranks(world_size, run_all, transport, tmp_path)[0]
    for loop, (kind, states) in zip(loops_of(transport), found, strict=True):
        what = f"{name_of(loop)}, {kind}: {{}}".format
        torch.testing.assert_close(states, run_plainly(loop, world_size), rtol=1e-5, atol=1e-6, msg=what)


def engine_for(stage: int = 0, accumulation: int = 1, **zero: Any) -> lowtide.Engine:
    torch.manual_seed(0)
    config = {"optimizer": OPTIMIZER, "gradient_accumulation_steps": accumulation}
    return lowtide.initialize(net(), {**config, "zero_optimization": {"stage": stage, **zero}})


def loss_of(engine: lowtide.Engine, step: int = 0) -> Tensor:
    loss: Tensor = engine(batch(step, engine.rank)).square().mean()
    return loss


@pytest.mark.parametrize("stage", [0, 3])
def test_a_graph_from_before_a_step_is_refused_as_in_torch(stage: int) -> None:
    with engine_for(stage) as engine:
        loss = loss_of(engine)
        loss.backward(retain_graph=True)
        engine.step()
        assert "modified by an inplace operation" in refusal(loss.backward, kind=RuntimeError)


def fail(gradient: Tensor) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("stage", [0, 3])
def test_a_backward_that_fails_ends_its_step_and_the_next_one_counts(stage: int) -> None:
    states = []
    for fails in (False, True):
        with engine_for(stage) as engine:
            for again in (False, True) if fails else ():  # with what was heard of the first one still there
                loss = loss_of(engine, step=5)
                hook = engine.module.get_parameter("2.weight").register_hook(fail)
                with pytest.raises(ZeroDivisionError):
                    loss.backward(retain_graph=again)
                hook.remove()
                if again:
                    loss.backward()
                    engine.zero_grad()
            loss_of(engine).backward()
            engine.step()
            states.append(engine.state_dict())
    assert differences(*states) == []


def test_the_loss_of_a_step_is_known_where_the_engine_was_told_it() -> None:
    with engine_for() as engine:
        loss = loss_of(engine)
        engine.scale(loss).backward()
        assert engine.step().loss == loss
        loss_of(engine).backward()
        assert engine.step().loss is None


@pytest.mark.parametrize("timing", [{}, {"update_in_backward": True}], ids=["after the norm", "in the backward"])
@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_a_step_without_gradients_is_an_error(stage: int, timing: dict[str, Any]) -> None:
    """On all ranks; those of rank 0 alone change all parameters."""
    other = torch.ones((), requires_grad=True)
    assert "call engine.backward(loss)" in NO_BACKWARD and "was the output of the model detached" in NO_GRADIENT
    with engine_for(stage, **timing) as engine:
        before = engine.state_dict()
        for text in (NO_BACKWARD, NO_GRADIENT, NO_BACKWARD):
            if text == NO_GRADIENT:
                engine.backward(loss_of(engine).detach() * other)
            assert refusal(engine.step, kind=StateError) == text
        assert engine.global_step == 0
        loss = loss_of(engine)
        engine.backward(loss if engine.rank == 0 else loss.detach() * other)
        engine.step()
        assert differences(before, engine.state_dict()) == list(before)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_backward_between_a_counted_step_and_its_update_is_refused(stage: int) -> None:
    """As of a loop with five batches an epoch, in steps of two. The complete step is there as before."""
    states = []
    for is_refused in (False, True):
        with engine_for(stage, accumulation=2) as engine:
            for step in (5, 5, 0, 1) if is_refused else (0, 1):
                loss_of(engine, step).backward()
                if step == 5 and engine.is_step_complete:
                    engine.module.zero_grad()
            loss = loss_of(engine, step=2)
            for backward in (loss.backward, partial(engine.backward, loss)) if is_refused else ():
                assert refusal(backward, kind=StateError) == (
                    "backward: expected engine.step() after the 2 microbatches of a step (gradient_accumulation_steps),"
                    " found another backward; call engine.step() after every backward (it acts when the step is "
                    "complete). A loop that counts itself sets gradient_accumulation_steps to 1 and says "
                    "engine.accumulate(last=...)"
                )
            engine.step()
            assert engine.global_step == 1
            states.append(engine.state_dict())
    assert differences(*states) == []


CLEAR_ALL: tuple[Callable[[lowtide.Engine], object], ...] = (
    lambda engine: engine.zero_grad(),
    lambda engine: engine.module.zero_grad(),
    lambda engine: engine.module.zero_grad(set_to_none=False),
)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_step_that_an_error_has_cut_is_not_completed_without_its_first_part(stage: int) -> None:
    """Where the loop counts: else the rest of the step would be taken for the whole."""
    states = []
    for clears in ((), CLEAR_ALL):
        with engine_for(stage) as engine:
            for clear in clears:
                with engine.no_sync():
                    for step in (5, 6):
                        loss_of(engine, step).backward()
                hook = engine.module.get_parameter("2.weight").register_hook(fail)
                with pytest.raises(ZeroDivisionError):
                    loss_of(engine, step=7).backward()
                hook.remove()
                loss = loss_of(engine, step=7)
                asks = {"engine.step()": (engine.step,), "backward": (loss.backward, partial(engine.backward, loss))}
                for what, ask in ((what, ask) for what, all_asks in asks.items() for ask in all_asks):
                    assert refusal(ask, kind=StateError) == (
                        f"{what}: expected all microbatches of the step, found 2 lost: an error in a backward has "
                        "dropped the gradients of this step so far. Call engine.zero_grad(), and begin the step again "
                        "with its first microbatch"
                    )
                assert engine.microbatches_lost == 2
                clear(engine)
            for step in range(2):
                with engine.accumulate(last=step == 1):
                    loss_of(engine, step).backward()
            assert engine.microbatches_lost == 0
            engine.step()
            states.append(engine.state_dict())
    assert differences(*states) == []


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_that_the_config_counts_begins_again_after_an_error(
    accumulation: int, caplog: pytest.LogCaptureFixture
) -> None:
    states = []
    caplog.set_level(logging.WARNING, logger="lowtide")
    for fails in (False, True):
        with engine_for(accumulation=accumulation) as engine:
            if fails:
                logging.getLogger("lowtide").propagate = True
                loss_of(engine, step=5).backward()
                hook = engine.module.get_parameter("2.weight").register_hook(fail)
                with pytest.raises(ZeroDivisionError):
                    loss_of(engine, step=5).backward()
                hook.remove()
            for step in range(2):
                loss_of(engine, step).backward()
            engine.step()
            states.append(engine.state_dict())
    assert [record.getMessage() for record in caplog.records] == [
        "an error in a backward has dropped the gradients of the earlier backwards of the step (1): begin the step "
        "again with its first microbatch"
    ]
    assert differences(*states) == []


def test_what_an_update_in_backward_cannot_take_in_or_back_is_refused() -> None:
    asks: dict[str, Any] = {
        "another backward": lambda engine, loss: loss.backward(),
        "a forward": lambda engine, loss: loss_of(engine),
        "engine.zero_grad()": lambda engine, loss: engine.zero_grad(),
    }
    for what, ask in asks.items():
        with engine_for(1, update_in_backward=True) as engine:
            loss, other = loss_of(engine), loss_of(engine)
            loss.backward()
            text = refusal(ask, engine, other, kind=StateError)
            assert "after the last backward of a step, " in text and f"found {what} after the backward has" in text


def test_a_backward_in_another_call_of_its_engine_is_refused() -> None:
    with engine_for() as engine, engine.gathered(modify=True):
        loss = engine.module(batch(0, 0)).sum()
        words = "loss.backward(): expected no call in progress, found engine.gathered(modify=True)"
        assert words in refusal(loss.backward, kind=StateError)
