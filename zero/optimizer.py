"""The optimizer over sharded groups: master weights, states, and who updates what."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.optimizer_step import RULES, UpdateRule, update_shard
from .gradient import GroupGradient
from .layout import BLOCK_NUMEL, Piece

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Run:
    """A stretch of a shard whose parameters have the same options."""

    start: int
    end: int
    options_index: int  # in the optimizer's param_groups


class ShardState:
    """Master weights and optimizer states of one group's shard, (shard_numel,) each.

    The master weights are the shard itself where parameters are float32 or wider.
    """

    def __init__(self, gradient: GroupGradient) -> None:
        self.gradient = gradient
        self.group = gradient.group
        self.is_mixed = self.group.dtype in (torch.bfloat16, torch.float16)
        shard = self.group.shard
        self.master = torch.zeros_like(shard, dtype=torch.float32) if self.is_mixed else shard
        self.states: dict[str, Tensor] = {}
        self.runs: list[Run] = []

    def set_runs(self, options_index_of: Mapping[int, int]) -> None:
        """options_index_of: id of a parameter -> index in param_groups."""
        starts: list[tuple[int, int]] = []
        for piece in self.group.pieces:
            index = options_index_of[id(self.group.params[piece.index])]
            if not starts or starts[-1][1] != index:
                starts.append((piece.offset_in_shard, index))
        # A run reaches to the next one, padding included: whole vectors, so that no element is a rest of its own.
        ends = [start for start, _ in starts[1:]] + [self.group.layout.shard_numel]
        self.runs = [Run(start, end, index) for (start, index), end in zip(starts, ends, strict=False)]


class ShardedOptimizer(torch.optim.Optimizer):
    """Updates every rank's shards. `param_groups` are the user's: learning rates and decays may be changed there.

    Two kinds of update: a fused rule of `kernels/` over whole runs, or the user's own elementwise torch optimizer
    class, which gets each run as one flat parameter.
    """

    def __init__(
        self,
        gradients: Sequence[GroupGradient],
        param_groups: list[dict[str, Any]],
        rule: UpdateRule | None,
        factory: OptimizerFactory | None,
    ) -> None:
        """param_groups: [{"params": [...], options...}]; exactly one of rule and factory."""
        # Optimizer.__init__ imports torch's compiler, 70 MiB a process; what unpickling sets is all that is needed. The
        # groups are the user's very dictionaries: a scheduler bound to them acts here too.
        self.__setstate__({"defaults": {}, "state": {}, "param_groups": param_groups})
        self.shards = [ShardState(gradient) for gradient in gradients]
        self.num_steps = 0
        self._rule = rule
        self._factory = factory
        self._inner: dict[int, torch.optim.Optimizer] = {}
        index_of = {id(p): index for index, group in enumerate(param_groups) for p in group["params"]}
        for shard in self.shards:
            shard.set_runs(index_of)

    @property
    def lr(self) -> float:
        """The learning rate of the first parameter group."""
        return float(self.param_groups[0]["lr"])

    def step(  # type: ignore[override]
        self,
        closure: Any = None,
        gradient_scale: float = 1.0,
        on_updated: Callable[[ShardState], None] | None = None,
    ) -> None:
        """Updates all shards with gradient_scale * gradient. The engine calls it; it has reduced the gradients.

        on_updated: called after each shard, so that sending it overlaps with the update of the next.
        """
        self.begin_step()
        for shard in self.shards:
            self.update(shard, gradient_scale)
            if on_updated is not None:
                on_updated(shard)

    def begin_step(self) -> None:
        """Counts a step whose shards are then updated one by one."""
        self.num_steps += 1

    def update(self, shard: ShardState, gradient_scale: float) -> None:
        """Updates one shard; its gradient is used up."""
        gradient = shard.gradient.shard
        if gradient is None:
            return
        if self._rule is not None:
            self._update_by_rule(self._rule, shard, gradient, gradient_scale)
        else:
            self._update_by_torch(shard, gradient, gradient_scale)

    # -- states by parameter, for checkpoints ---------------------------------------------------------------------

    @property
    def kind(self) -> str:
        """The name of the rule, or of the caller's class."""
        if self._rule is not None:
            return self._rule.name
        assert self._factory is not None
        return type(self._factory([nn.Parameter(torch.zeros(1))])).__name__

    def can_take(self, kind: str, states: Collection[str]) -> bool:
        """True where states of these names, made by an optimizer of that kind, are states of this one."""
        return set(states) == set(self._rule.states) if self._rule is not None else kind == self.kind

    def states_of(self, shard: ShardState, piece: Piece) -> dict[str, Tensor]:
        """Views, (piece.numel,) each, of the elementwise states of a piece; empty before the first step."""
        states, start = shard.states, 0
        inner = self._inner.get(id(shard))
        if inner is not None:
            run, param = next(
                (run, options["params"][0])
                for run, options in zip(shard.runs, inner.param_groups, strict=True)
                if run.start <= piece.offset_in_shard < run.end
            )
            states, start = {n: v for n, v in inner.state[param].items() if _is_elementwise(v, param)}, run.start
        low = piece.offset_in_shard - start
        return {name: state[low : low + piece.numel] for name, state in states.items()}

    def state_dtypes(self) -> dict[str, torch.dtype]:
        """The elementwise states by name; empty before the first step, and where this rank has no element."""
        for shard in self.shards:
            for piece in shard.group.pieces:
                return {name: values.dtype for name, values in self.states_of(shard, piece).items()}
        return {}

    def scalar_states(self) -> dict[int, dict[str, Any]]:
        """Index in param_groups -> what a torch optimizer keeps there beside elementwise states: its step, mostly."""
        found: dict[int, dict[str, Any]] = {}
        for shard in self.shards:
            inner = self._inner.get(id(shard))
            for run, options in zip(shard.runs, inner.param_groups if inner is not None else (), strict=False):
                param = options["params"][0]
                values = inner.state[param].items() if inner is not None else ()
                found[run.options_index] = {n: v for n, v in values if not _is_elementwise(v, param)}
        return found

    def make_states(
        self, num_steps: int, dtypes: Mapping[str, torch.dtype], scalars: Mapping[int, Mapping[str, Any]]
    ) -> None:
        """Takes memory for the states of a run that has made `num_steps`; `states_of` says where to fill them in.

        dtypes: of the elementwise states by name; scalars: as `scalar_states` gives them.
        """
        self.num_steps = num_steps
        self._inner.clear()
        for shard in self.shards:
            shard.states.clear()
        if not dtypes and not scalars:
            return
        for shard in self.shards:
            if self._rule is not None:
                self._make_rule_states(self._rule, shard)
                continue
            inner = self._inner[id(shard)] = self._make_inner(shard)
            for run, options in zip(shard.runs, inner.param_groups, strict=True):
                param = options["params"][0]
                inner.state[param].update(
                    {name: torch.zeros_like(param, dtype=dtype) for name, dtype in dtypes.items()}
                )
                for name, value in scalars.get(run.options_index, {}).items():
                    inner.state[param][name] = value.clone() if isinstance(value, Tensor) else value

    def state_bytes(self) -> int:
        """Bytes of optimizer states and separate master weights on this rank."""
        total = 0
        for shard in self.shards:
            if shard.is_mixed:
                total += shard.master.nbytes
            total += sum(state.nbytes for state in shard.states.values())
        for inner in self._inner.values():
            for state in inner.state.values():
                total += sum(v.nbytes for v in state.values() if isinstance(v, Tensor) and v.dim())
        return total

    def _update_by_rule(self, rule: UpdateRule, shard: ShardState, gradient: Tensor, gradient_scale: float) -> None:
        if not shard.states:
            self._make_rule_states(rule, shard)
        states = list(shard.states.values())
        for run in shard.runs:
            part = slice(run.start, run.end)
            update_shard(
                rule,
                shard.master[part],
                gradient[part],
                [state[part] for state in states],
                self.num_steps,
                self.param_groups[run.options_index],
                gradient_scale,
                shard.group.shard[part] if shard.is_mixed else None,
            )

    def _make_rule_states(self, rule: UpdateRule, shard: ShardState) -> None:
        for name in rule.states:
            start = self.param_groups[0][rule.start_option] if rule.start_option else 0.0
            shard.states[name] = torch.full_like(shard.master, start)

    def _update_by_torch(self, shard: ShardState, gradient: Tensor, gradient_scale: float) -> None:
        inner = self._inner.get(id(shard))
        if inner is None:
            inner = self._inner[id(shard)] = self._make_inner(shard)
        for run, options in zip(shard.runs, inner.param_groups, strict=True):
            outer = self.param_groups[run.options_index]
            options.update({key: value for key, value in outer.items() if key in options and key != "params"})
            part = gradient[run.start : run.end]
            options["params"][0].grad = (part.to(shard.master.dtype)).mul_(gradient_scale)
        inner.step()
        for options in inner.param_groups:
            options["params"][0].grad = None
        if shard.is_mixed:
            shard.group.shard.copy_(shard.master)

    def _make_inner(self, shard: ShardState) -> torch.optim.Optimizer:
        assert self._factory is not None
        views = [nn.Parameter(shard.master[run.start : run.end]) for run in shard.runs]
        if not views:
            views = [nn.Parameter(shard.master[:0])]
        inner = self._factory(views)
        template = inner.param_groups[0]
        inner.param_groups[:] = [{**template, "params": [view]} for view in views][: len(shard.runs)]
        return inner


def _is_elementwise(value: Any, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == param.shape and value.dim() == 1


def rule_named(name: str, options: Mapping[str, Any]) -> UpdateRule:
    """The fused rule of that name; SGD without momentum keeps no state."""
    rule = RULES[name]
    if name == "sgd" and not options["momentum"]:
        return UpdateRule("sgd", (), rule.apply)
    return rule


_TORCH_TWINS = {
    torch.optim.AdamW: "adamw",
    torch.optim.Adam: "adam",
    torch.optim.SGD: "sgd",
    torch.optim.Adagrad: "adagrad",
}


def rule_like(optimizer: torch.optim.Optimizer) -> UpdateRule | None:
    """The fused rule that does what this torch optimizer does, where there is one for all its options."""
    name = _TORCH_TWINS.get(type(optimizer))
    if name is None:
        return None
    for options in optimizer.param_groups:
        if (
            options.get("amsgrad")
            or options.get("maximize")
            or options.get("capturable")
            or options.get("differentiable")
        ):
            return None
        if name == "adam" and options.get("decoupled_weight_decay"):
            return None
        if not all(isinstance(value, (int, float, bool, tuple, list, type(None))) for value in options.values()):
            return None
    momenta = {bool(options.get("momentum")) for options in optimizer.param_groups}
    if len(momenta) > 1:
        return None
    return rule_named(name, optimizer.param_groups[0])


def check_elementwise(factory: OptimizerFactory) -> None:
    """Raises ValueError unless the optimizer treats every element by itself, so that it can run on shards.

    Tried on a small matrix: three steps on the whole and on its flat halves must give the same values.
    """
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(8, BLOCK_NUMEL // 8, generator=generator)
    gradients = [torch.randn(whole.shape, generator=generator) for _ in range(3)]
    half = whole.numel() // 2
    results = []
    name = "the optimizer"
    for parts in ([whole.shape], [(half,), (half,)]):
        values = torch.split(whole.clone().reshape(-1), [torch.Size(shape).numel() for shape in parts])
        params = [nn.Parameter(v.clone().view(shape)) for v, shape in zip(values, parts, strict=True)]
        try:
            optimizer = factory(params)
            name = type(optimizer).__name__
            for gradient in gradients:
                pieces = torch.split(gradient.reshape(-1), [p.numel() for p in params])
                for param, piece in zip(params, pieces, strict=True):
                    param.grad = piece.clone().view(param.shape)
                optimizer.step()
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise ValueError(
                f"optimizer: expected a torch optimizer that updates each element by itself, found {name}, "
                f"which failed on a flat parameter: {error}"
            ) from error
        results.append(torch.cat([param.detach().reshape(-1) for param in params]))
    if not torch.allclose(results[0], results[1], rtol=1e-6, atol=1e-9):
        raise ValueError(
            f"optimizer: expected a torch optimizer that updates each element by itself, found {name}, whose result "
            "depends on the shape of the parameter; shards of a parameter cannot be updated one by one. Use an "
            "elementwise one (AdamW, SGD, Lion, ...)."
        )
