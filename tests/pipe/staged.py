"""A model run as a chain of stages in one process, beside the whole model."""

import pickle
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.pipe.split.carried import Carried
from lowtide.pipe.split.split import SplitPlan, plan_split
from lowtide.pipe.stage import Stage

Build = Callable[[], nn.Module]
Call = Callable[[nn.Module], Any]


@dataclass
class Outcome:
    """loss and, by name, the gradient of each parameter that has one."""

    loss: Tensor
    gradients: dict[str, Tensor]
    carried: list[Carried] = field(default_factory=list)

    def differences(self, other: "Outcome") -> list[str]:
        """What is not the same to the last bit."""
        ours, theirs = ({"loss": one.loss, **one.gradients} for one in (self, other))
        shared = ours.keys() & theirs.keys()
        return sorted(
            (ours.keys() ^ theirs.keys()) | {one for one in shared if not torch.equal(ours[one], theirs[one])}
        )


def seeded(build: Build) -> nn.Module:
    torch.manual_seed(0)
    return build()


def loss_in(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.loss


def whole(model: nn.Module, call: Call) -> Outcome:
    """One backward of the whole model."""
    loss = loss_in(call(model))
    loss.backward()
    return Outcome(loss, {name: param.grad for name, param in model.named_parameters() if param.grad is not None})


def stages_of(build: Build, num_stages: int, balance: str | Sequence[int] = "parameters") -> list[Stage]:
    """Each stage on a model of its own, as on ranks of their own."""
    plan = plan_split(seeded(build), num_stages, balance)
    return [Stage(seeded(build), travelled(plan), index) for index in range(num_stages)]


def staged(stages: Sequence[Stage], call: Call, form: Hashable = None) -> Outcome:
    """One forward through all stages and back. Gradients of tied parameters are summed, last stage first."""
    sent: list[Carried] = []
    arrived: list[Carried] = []
    output: Any = None
    for stage in stages:
        output = stage.run(call, arrived[-1] if arrived else None, form)
        if not stage.is_last:
            assert isinstance(output, Carried)
            sent.append(output)
            arrived.append(Carried(output.tensors, travelled(output.spec)).detached())
    loss = loss_in(output)
    loss.backward()
    for output, leaves in zip(reversed(sent), reversed(arrived), strict=True):
        pairs = [(tensor, leaf.grad) for tensor, leaf in zip(output.tensors, leaves.tensors, strict=True)]
        known = [(tensor, grad) for tensor, grad in pairs if grad is not None]
        torch.autograd.backward([tensor for tensor, _ in known], [grad for _, grad in known])
    gradients: dict[str, Tensor] = {}
    for stage in reversed(stages):
        for name, param in stage.named_parameters():
            if param.grad is not None:
                gradients[name] = gradients[name] + param.grad if name in gradients else param.grad
    return Outcome(loss, gradients, sent)


def equal_staged(build: Build, call: Call, num_stages: int, balance: str | Sequence[int] = "parameters") -> Outcome:
    """What stages give, which has the bits of the whole model."""
    found = staged(stages_of(build, num_stages, balance), call)
    assert found.differences(whole(seeded(build), call)) == [], num_stages
    return found


def travelled(plain: Any) -> Any:
    """As it comes out of a message between processes."""
    return pickle.loads(pickle.dumps(plain))


def numels(plan: SplitPlan, model: nn.Module) -> list[int]:
    """Parameters of each stage."""
    sizes = {name: param.numel() for name, param in model.named_parameters()}
    return [sum(sizes[name] for name in names) for names in plan.parameters]
