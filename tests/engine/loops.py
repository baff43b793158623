"""Training loops as people write them, for plain torch and for engines alike.

A loop gets `make`, which gives each of its models something to call, to step and to zero, and `data`, which has the
batches of a step: one for each rank whose gradients are to be averaged. Plain torch gets those of all ranks, an engine
its own.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import lowtide

WIDTH = 6
STEPS = 2


class Trained(Protocol):
    """A model that is trained: an engine, or `Plain`."""

    module: Any

    def __call__(self, *args: Any) -> Any: ...
    def step(self) -> Any: ...
    def zero_grad(self) -> None: ...
    def frozen(self) -> AbstractContextManager[None]: ...
    def accumulate(self, last: bool) -> AbstractContextManager[None]: ...
    def state_dict(self) -> dict[str, Tensor]: ...


class Plain:
    """Plain torch under the names of an engine."""

    def __init__(self, model: nn.Module, optimizer: dict[str, Any]) -> None:
        kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
        self.module = model
        trained = [param for param in model.parameters() if param.requires_grad]
        self._optimizer = kinds[optimizer["type"]](trained, **optimizer["params"])

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def zero_grad(self) -> None:
        self.module.zero_grad()

    @contextmanager
    def frozen(self) -> Any:
        trained = [param for param in self.module.parameters() if param.requires_grad]
        for param in trained:
            param.requires_grad_(False)
        yield
        for param in trained:
            param.requires_grad_(True)

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.module.state_dict())


Make = Callable[[nn.Module], Trained]
Data = Callable[[int], Sequence[Tensor]]
Loop = Callable[[Make, Data], list[Trained]]


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


def plain(make: Make, data: Data) -> list[Trained]:
    model = make(net())
    for step in range(STEPS):
        mean([model(x).square().mean() for x in data(step)]).backward()
        model.step()
    return [model]


def gradient_of_an_output(make: Make, data: Data) -> list[Trained]:
    """A backward that begins with a tensor and its gradient."""
    model = make(net())
    for step in range(STEPS):
        batches = data(step)
        for x in batches:
            y = model(x)
            y.backward(torch.ones_like(y) / (len(batches) * len(x)))
        model.step()
    return [model]


def two_forwards_one_loss(make: Make, data: Data) -> list[Trained]:
    """SimCLR: two views of a batch, and a loss over both outputs."""
    model = make(net(outputs=4))
    for step in range(STEPS):
        losses = []
        for x in data(step):
            first, second = (functional.normalize(model(view), dim=1) for view in (x, x.flip(1) + 0.1))
            losses.append(functional.cross_entropy(first @ second.t() / 0.5, torch.arange(len(x))))
        mean(losses).backward()
        model.step()
    return [model]


def two_forwards_two_backwards(make: Make, data: Data) -> list[Trained]:
    """In the order of the forwards, and in the other one."""
    model = make(net())
    for step in range(STEPS):
        pairs = [(model(x).square().mean(), model(2 * x).abs().mean()) for x in data(step)]
        losses = [mean(list(part)) for part in zip(*pairs, strict=True)]
        for loss in losses if step % 2 else reversed(losses):
            loss.backward()
        model.step()
    return [model]


def kept_graph(make: Make, data: Data) -> list[Trained]:
    model = make(net())
    for step in range(STEPS):
        outputs = [model(x) for x in data(step)]
        mean([y.square().mean() for y in outputs]).backward(retain_graph=True)
        mean([y.abs().mean() for y in outputs]).backward()
        model.step()
    return [model]


def evaluation_in_between(make: Make, data: Data) -> list[Trained]:
    model = make(net())
    for step in range(STEPS):
        losses = []
        for x in data(step):
            y = model(x)
            with torch.no_grad():
                baseline = model(x + 1)
            losses.append((y * baseline).mean())
        mean(losses).backward()
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


def actor_and_critic(make: Make, data: Data) -> list[Trained]:
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


def dcgan(make: Make, data: Data) -> list[Trained]:
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


def frozen_critic(make: Make, data: Data) -> list[Trained]:
    generator, critic = make(net(outputs=WIDTH)), make(net())
    for step in range(STEPS):
        with critic.frozen():
            mean([-critic(generator(x)).mean() for x in data(step)]).backward()
            generator.step()
        mean([(critic(x) - critic(generator(x).detach())).square().mean() for x in data(step)]).backward()
        critic.step()
    return [generator, critic]


def critic_frozen_after_its_forward(make: Make, data: Data) -> list[Trained]:
    """Autograd comes to its parameters, and adds nothing to them."""
    generator, critic = make(net(outputs=WIDTH)), make(net())
    for step in range(STEPS):
        loss = mean([-critic(generator(x)).mean() for x in data(step)])
        with critic.frozen():
            loss.backward()
        generator.step()
        mean([(critic(x) - critic(generator(x).detach())).square().mean() for x in data(step)]).backward()
        critic.step()
    return [generator, critic]


def wgan_gp(make: Make, data: Data) -> list[Trained]:
    generator, critic = make(net(outputs=WIDTH)), make(net())
    for step in range(STEPS):
        losses = []
        for x in data(step):
            with torch.no_grad():
                fake = generator(x.flip(0))
            between = (0.3 * x + 0.7 * fake).requires_grad_()
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            losses.append(critic(fake).mean() - critic(x).mean() + 10 * penalty)
        mean(losses).backward()
        critic.step()
        mean([-critic(generator(x)).mean() for x in data(step)]).backward()
        generator.step()
        critic.zero_grad()
    return [generator, critic]


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


def gradient_inside_of_the_forward(make: Make, data: Data) -> list[Trained]:
    model = make(Forces())
    for step in range(STEPS):
        losses = []
        for x in data(step):
            energy, forces = model(x)
            losses.append(energy.square().mean() + (forces - x).square().mean())
        mean(losses).backward()
        model.step()
    return [model]


class Recomputed(nn.Module):
    """Blocks under reentrant checkpointing: one by one, one several times in a region, and regions in regions."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.last = nn.Linear(8, 1)
        if frozen:
            self.first.requires_grad_(False)
            self.last.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.blocks

        def twice(h: Tensor) -> Tensor:
            return b(b(h)) + checkpoint(c, h, use_reentrant=True)

        x = self.first(x)
        x = x if x.requires_grad else x.requires_grad_()  # as transformers' enable_input_require_grads
        x = checkpoint(a, x, use_reentrant=True)
        x = checkpoint(twice, x, use_reentrant=True)
        x = checkpoint(lambda h: d(checkpoint(a, h, use_reentrant=False)), x, use_reentrant=False)
        return self.last(x)


def reentrant_checkpointing(make: Make, data: Data) -> list[Trained]:
    model = make(Recomputed())
    for step in range(STEPS):
        mean([model(x).square().mean() for x in data(step)]).backward()
        model.step()
    return [model]


def reentrant_checkpointing_of_what_alone_is_trained(make: Make, data: Data) -> list[Trained]:
    model = make(Recomputed(frozen=True))
    for step in range(STEPS):
        mean([model(x).square().mean() for x in data(step)]).backward()
        model.step()
    return [model]


def straight_through_two(make: Make, data: Data) -> list[Trained]:
    """Split learning: the backward goes on from one to the other; every second loss sees both outputs."""
    lower, upper = make(net(outputs=WIDTH)), make(net())
    for step in range(STEPS):
        losses = []
        for x in data(step):
            middle = lower(x)
            losses.append(upper(middle).square().mean() + (middle.square().mean() if step % 2 else 0))
        mean(losses).backward()
        lower.step(), upper.step()
    return [lower, upper]


def one_loss_over_two(make: Make, data: Data) -> list[Trained]:
    left, right = make(net()), make(net())
    for step in range(STEPS):
        mean([(left(x) - right(x.flip(1))).square().mean() for x in data(step)]).backward()
        left.step(), right.step()
    return [left, right]


def distillation(make: Make, data: Data) -> list[Trained]:
    teacher, student = make(net(outputs=4)), make(net(outputs=4))
    for step in range(STEPS):
        losses = []
        for x in data(step):
            with torch.no_grad():
                target = teacher(x).softmax(1)
            losses.append(functional.kl_div(student(x).log_softmax(1), target, reduction="batchmean"))
        mean(losses).backward()
        student.step()
    return [teacher, student]


def counted_by_hand(make: Make, data: Data) -> list[Trained]:
    """Steps of one and of two microbatches."""
    model = make(net())
    for step in range(STEPS):
        for index in range(step + 1):
            with model.accumulate(last=index == step):
                mean([model(x + index).square().mean() for x in data(step)]).backward()
            if index < step and not isinstance(model, Plain):
                assert model.step() is model.step()  # nothing happens
        model.step()
    return [model]


def blocks_called_alone(make: Make, data: Data) -> list[Trained]:
    """Without the forward of the whole."""
    model = make(net())
    for step in range(STEPS):
        losses = []
        for x in data(step):
            for layer in model.module:
                x = layer(x)
            losses.append(x.square().mean())
        mean(losses).backward()
        model.step()
    return [model]


class WithLogits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net(outputs=3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": functional.cross_entropy(logits, torch.arange(len(x)) % 3), "logits": logits}


def loss_and_logits(make: Make, data: Data) -> list[Trained]:
    """Both are returned, and a loss of one's own is added to the first."""
    model = make(WithLogits())
    for step in range(STEPS):
        outputs = [model(x) for x in data(step)]
        mean([output["loss"] + 0.1 * output["logits"].square().mean() for output in outputs]).backward()
        model.step()
    return [model]


def weighted_by_own_gradients(make: Make, data: Data) -> list[Trained]:
    """GradNorm: losses are weighed by gradients of a layer that `torch.autograd.grad` gives."""
    model = make(net())
    last = model.module.get_parameter("6.weight")
    for step in range(STEPS):
        losses = []
        for x in data(step):
            y = model(x)
            parts = (y.square().mean(), y.abs().mean())
            norms = [torch.autograd.grad(part, last, retain_graph=True)[0].norm() for part in parts]
            losses.append(parts[0] / (0.1 + norms[0]) + parts[1] * norms[1])
        mean(losses).backward()
        model.step()
    return [model]


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


def methods(make: Make, data: Data) -> list[Trained]:
    """Called without the forward of the whole, and beside it; one with other values in place of a parameter's."""
    model = make(Parts())
    for step in range(STEPS):
        losses = []
        for x in data(step):
            encoded = model.module.encode(x)
            with torch.no_grad():
                target = model.module.project(model.module.encode(x + 1))
            other = torch.func.functional_call(model.module, {"position": torch.ones(WIDTH)}, (x,))
            losses.append(
                (model.module.project(encoded) - target).square().mean() + other.mean() + model(x).abs().mean()
            )
        mean(losses).backward()
        model.step()
    return [model]


def methods_twice(make: Make, data: Data) -> list[Trained]:
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


def cleared_after_the_forward(make: Make, data: Data) -> list[Trained]:
    critic = make(net())
    for step in range(STEPS):
        losses = []
        for x in data(step):
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
            losses.append((slope.norm(dim=1) - 1).square().mean())
        critic.zero_grad()
        mean(losses).backward()
        critic.step()
    return [critic]


def blocks_after_an_error(make: Make, data: Data) -> list[Trained]:
    model = make(net())
    for step in range(STEPS):
        hook = model.module.get_parameter("0.weight").register_hook(lambda gradient: 1 / 0)
        with suppress(ZeroDivisionError):
            mean([model(x).square().mean() for x in data(step + 1)]).backward()
        hook.remove()
        if isinstance(model, Plain):
            model.zero_grad()
        losses = []
        for x in data(step):
            for layer in model.module:
                x = layer(x)
            losses.append(x.square().mean())
        mean(losses).backward()
        model.step()
    return [model]


LOOPS: tuple[Loop, ...] = (
    plain,
    gradient_of_an_output,
    two_forwards_one_loss,
    two_forwards_two_backwards,
    kept_graph,
    evaluation_in_between,
    actor_and_critic,
    dcgan,
    frozen_critic,
    wgan_gp,
    gradient_inside_of_the_forward,
    reentrant_checkpointing,
    reentrant_checkpointing_of_what_alone_is_trained,
    straight_through_two,
    one_loss_over_two,
    distillation,
    counted_by_hand,
    blocks_called_alone,
    methods,
    methods_twice,
    cleared_after_the_forward,
    blocks_after_an_error,
    loss_and_logits,
    weighted_by_own_gradients,
    critic_frozen_after_its_forward,
)
OPTIMIZER = {"type": "adamw", "params": {"lr": 0.01, "weight_decay": 0.1}}


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def run_plainly(loop: Loop, world_size: int, optimizer: dict[str, Any] = OPTIMIZER) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    trained = loop(lambda model: Plain(model, optimizer), lambda step: [batch(step, r) for r in range(world_size)])
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
