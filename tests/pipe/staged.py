"""A model run as a chain of stages in one process, beside the whole model."""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.pipe.split.carried import Carried
from lowtide.pipe.split.split import SplitPlan, plan_split
from lowtide.pipe.stage import Stage

Call = Callable[[nn.Module], Any]


@dataclass
class Outcome:
    """loss and, by name, the gradient of each parameter that has one."""

    loss: Tensor
    gradients: dict[str, Tensor]
    carried: list[Carried] = field(default_factory=list)

    def differences(self, other: "Outcome") -> list[str]:
        """What is not the same to the last bit."""
        names = {*self.gradients, *other.gradients}
        differing = [
            name
            for name in sorted(names)
            if name not in self.gradients
            or name not in other.gradients
            or not torch.equal(self.gradients[name], other.gradients[name])
        ]
        return differing if torch.equal(self.loss, other.loss) else ["loss", *differing]


def loss_in(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.loss


def whole(model: nn.Module, call: Call) -> Outcome:
    """One backward of the whole model."""
    loss = loss_in(call(model))
    loss.backward()
    return Outcome(loss, {name: param.grad for name, param in model.named_parameters() if param.grad is not None})


def stages_of(
    build: Callable[[], nn.Module], num_stages: int, balance: str | Sequence[int] = "parameters"
) -> list[Stage]:
    """Each stage on a model of its own, as on ranks of their own."""
    plan = plan_split(build(), num_stages, balance)
    return [Stage(build(), travelled(plan), index) for index in range(num_stages)]


def staged(stages: Sequence[Stage], call: Call) -> Outcome:
    """One forward through all stages and back. Gradients of tied parameters are summed, last stage first."""
    sent: list[Carried] = []
    arrived: list[Carried] = []
    output: Any = None
    for stage in stages:
        output = stage.run(call, arrived[-1] if arrived else None)
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


def travelled(plain: Any) -> Any:
    """As it comes out of a message between processes."""
    return pickle.loads(pickle.dumps(plain))


def numels(plan: SplitPlan, model: nn.Module) -> list[int]:
    """Parameters of each stage."""
    sizes = {name: param.numel() for name, param in model.named_parameters()}
    return [sum(sizes[name] for name in names) for names in plan.parameters]
