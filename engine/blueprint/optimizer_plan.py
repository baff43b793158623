"""Chooses the optimizer that updates the shards: the config's, or the caller's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...kernels.dispatch import Backend
from ...optimizers import OPTIMIZERS
from ...optimizers.optimizer import Optimizer, Options, WholeTensorRule
from ...zero.fused_update import FusedUpdate
from ...zero.master_weights import MasterWeights
from ...zero.plan import GroupPlan, Role
from ...zero.sign_update import SignUpdate
from ...zero.torch_update import OptimizerFactory, TorchUpdate, another, check_elementwise, record_like
from ...zero.whole_update import WholeUpdate
from ..config.config import Config

_MASTERS = {
    True: MasterWeights.WIDER,
    False: MasterWeights.NONE,
    "kahan": MasterWeights.KAHAN,
    "int8": MasterWeights.SPLIT,
}
_STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}

OptimizerChoice = torch.optim.Optimizer | type[torch.optim.Optimizer] | Callable[[Any], torch.optim.Optimizer] | None


@dataclass(frozen=True)
class OptimizerPlan:
    """Options of each parameter, and the update: a rule of `kernels/`, or the caller's elementwise optimizer.

    | parameter                                  | role                                                       |
    |--------------------------------------------|------------------------------------------------------------|
    | in an optimizer group                      | updated; memory is also taken while it is frozen           |
    | in no group, requires a gradient           | left out: its gradient is summed and counts in the norm    |
    | in no group, requires no gradient          | frozen                                                     |
    | not floating-point                         | frozen                                                     |
    | of an engine without an optimizer          | frozen                                                     |
    """

    param_groups: list[dict[str, Any]]  # the caller's dictionaries, not copies
    defaults: dict[str, Any]  # options that a group leaves out
    fused: FusedUpdate | None
    factory: OptimizerFactory | None  # makes the caller's class, if no rule is equivalent
    masters: MasterWeights = MasterWeights.WIDER
    seed: int = 0  # of random rounding without master weights
    num_stepped: int = 0  # parameters with states of the caller's optimizer, which stay there

    @classmethod
    def of(cls, config: Config, module: nn.Module, choice: OptimizerChoice) -> OptimizerPlan:
        """Choose the optimizer. Raises ValueError if two are given, it cannot run on shards, or it is needed and
        missing.
        """
        if choice is not None and config.optimizer is not None:
            raise ValueError(
                f'optimizer: expected a single optimizer, found "{config.optimizer.type}" in the config and another '
                "passed to initialize; remove either (a preset has an optimizer: write its remaining keys)"
            )
        params = list(module.parameters())
        trained = [param for param in params if param.requires_grad]
        backend, seed = optimizer_backend(config), config.seed or 0
        masters = _MASTERS[config.bf16.masters] if config.bf16.enabled else MasterWeights.WIDER
        if choice is None and config.optimizer is None:
            _check_needs_none(config)
            return cls([], {}, FusedUpdate(_NOTHING, {}, torch.float32, backend), None)
        # An optimizer instance may have parameters that the user will unfreeze later.
        if not trained and not isinstance(choice, torch.optim.Optimizer):
            raise ValueError(
                f"model: expected a parameter that requires a gradient, found {len(params)} parameters that do not; "
                "call requires_grad_(True) on the parameters to train"
            )
        if isinstance(choice, (list, tuple)):
            raise ValueError(
                f"optimizer: expected a single optimizer, found a {type(choice).__name__} of {len(choice)}; use an "
                "optimizer with a group for each kind of parameter"
            )
        if choice is not None:
            # Twice: a class is refused before it is called, and a function may return an optimizer of any class.
            _check_by_element(choice)
            make = cast(Callable[[Any], torch.optim.Optimizer], choice)
            own = choice if isinstance(choice, torch.optim.Optimizer) else make(trained)
            _check_by_element(own)
            _check_members(own, params)
            # Adagrad has states before its first step.
            num_stepped = sum(bool(state) and float(state.get("step", 1)) > 0 for state in own.state.values())
            return replace(cls._like(own, backend, masters, seed), num_stepped=num_stepped)
        assert config.optimizer is not None
        options, record = config.optimizer.options, OPTIMIZERS[config.optimizer.type]
        param_groups: list[dict[str, Any]] = [{"params": trained, **options}]
        if record.whole is not None and record.whole.matrix is not None:
            param_groups = _divided(module, trained, options, record)
        state_dtype = _STATE_DTYPES[config.optimizer.state_dtype]
        kind = WholeUpdate if record.whole is not None else SignUpdate if record.sends_signs else FusedUpdate
        by_group = tuple(param_groups) if len(param_groups) > 1 else ()
        update = kind(record, options, state_dtype, backend, masters, seed, by_group)
        return cls(param_groups, dict(options), update, None, masters, seed)

    @classmethod
    def _like(cls, own: torch.optim.Optimizer, backend: Backend, masters: MasterWeights, seed: int) -> OptimizerPlan:
        # The optimizer's `step` is never called, so a scheduler on it would warn. Test: test_torch_schedulers.py.
        own._opt_called = True  # type: ignore[attr-defined]
        record = record_like(own)
        if record is not None:
            # torch's Adagrad fills the states of all groups with its constructor's value, whatever the groups say.
            starts = {name: own.defaults[name] for state in record.states if (name := state.start_option) is not None}
            update = FusedUpdate(record, {**own.param_groups[0], **starts}, torch.float32, backend, masters, seed)
            # The caller's dictionaries, not copies: schedulers of the caller write the learning rate into them.
            return cls(own.param_groups, own.defaults, update, None, masters, seed)
        if masters.remainder is not None:
            raise ValueError(
                f'bf16.masters: "{masters.value}" needs an optimizer with known states, found {type(own).__name__}; '
                "use an optimizer of the config, or set false or true"
            )
        factory = partial(another, own)
        check_elementwise(factory)
        return cls(own.param_groups, own.defaults, None, factory, masters, seed)

    @property
    def trains(self) -> bool:
        """Whether the training has an optimizer. Without it no parameter has a gradient."""
        return bool(self.param_groups)

    @cached_property
    def _members(self) -> frozenset[int]:
        return frozenset(id(param) for group in self.param_groups for param in group["params"])

    def role_of(self, param: nn.Parameter) -> Role:
        """Return the role of a parameter of the model, as in the table above."""
        # Integers (quantized base weights) have no gradient, even if the optimizer lists them.
        if id(param) in self._members and param.is_floating_point():
            return Role.UPDATED
        return Role.LEFT_OUT if param.requires_grad and self.trains else Role.FROZEN

    def notes(self, module: nn.Module) -> list[str]:
        """Return notes on states of the caller's optimizer, and on frozen parameters in its groups."""
        notes = []
        if self.num_stepped:
            notes.append(
                f"optimizer: its states of {self.num_stepped} parameters have no effect, and begin anew; save and load "
                "states with engine.save_checkpoint and engine.load_checkpoint"
            )
        frozen = [p for p in module.parameters() if not p.requires_grad and self.role_of(p) is Role.UPDATED]
        if not frozen:
            return notes
        numel = sum(param.numel() for param in frozen)
        return [
            *notes,
            f"optimizer: {len(frozen)} of its parameters ({numel:,} elements) are frozen. Their gradients and states "
            "take memory, so that requires_grad_(True) works later; leave out parameters that stay frozen",
        ]

    def check_states(self, groups: Sequence[GroupPlan]) -> None:
        """Raise ValueError if updated groups cannot have states in the wanted dtype."""
        wide = [group.name for group in groups if group.dtype == torch.float64]
        if self.fused is not None and self.fused.state_dtype != torch.float32 and wide:
            name = next(name for name, dtype in _STATE_DTYPES.items() if dtype == self.fused.state_dtype)
            raise ValueError(
                f'optimizer.params.state_dtype: "{name}" needs parameters of at most float32, found float64 in '
                f'{wide[0]}; use "fp32", then states have the dtype of the parameters'
            )

    def new_states(self, master: Tensor, options_index: int = 0) -> dict[str, Tensor]:
        """Return new states of master weights (n,), by name; empty if only the first step creates them."""
        return {} if self.fused is None else self.fused.new_states(master, options_index)

    def options_index(self, group: GroupPlan) -> int:
        """Return the index in param_groups if a group's states depend on it, else 0."""
        # `_divided` makes two groups of options: 0 has the matrices, 1 has the rest.
        return int(self.moves_matrices and not self.is_matrix(group.params[0][1]))

    def is_matrix(self, param: nn.Parameter) -> bool:
        """Return whether a parameter is updated as a whole matrix, with states of a different kind."""
        return self.moves_matrices and id(param) in self._matrices

    @property
    def moves_matrices(self) -> bool:
        """Whether ranks exchange parts of whole matrices."""
        return self.fused is not None and bool(self.fused.by_group)

    @property
    def sends_signs(self) -> bool:
        """Whether ranks exchange signs of momenta instead of gradients."""
        return self.fused is not None and self.fused.optimizer.sends_signs

    @property
    def whole(self) -> WholeTensorRule | None:
        """The rule of an update that works on whole parameters, while a shard has parts of them."""
        return None if self.fused is None else self.fused.optimizer.whole

    @cached_property
    def _matrices(self) -> frozenset[int]:
        return frozenset(id(param) for param in self.param_groups[0]["params"])

    def make_update(self) -> FusedUpdate | TorchUpdate:
        """Return the update that does to shards what the optimizer does to parameters."""
        if self.fused is not None:
            return self.fused
        assert self.factory is not None
        return TorchUpdate(self.factory, self.param_groups, self.masters, self.seed)


def _divided(
    module: nn.Module, trained: list[nn.Parameter], options: dict[str, Any], record: Optimizer
) -> list[dict[str, Any]]:
    """Divide the parameters into matrices and the rest: vectors, and unless `takes_all`, embeddings and heads."""
    assert record.whole is not None
    if record.whole.takes_all:
        by_kind = [[param for param in trained if (param.dim() >= 2) is wanted] for wanted in (True, False)]
        return [{"params": by_kind[i], **options, "is_matrix": i == 0, "is_other": i == 1} for i in (0, 1)]
    others = {id(p) for part in module.modules() if isinstance(part, nn.Embedding) for p in part.parameters(False)}
    # A tied weight has several names. Any of them can tell that it is an embedding or a head.
    for name, param in module.named_parameters(remove_duplicate=False):
        parts = name.lower().split(".")
        # The last part of a name is the parameter. The part before is the module: "head" in timm's models.
        if any(word in part for part in parts for word in ("embed", "lm_head")) or parts[-2:-1] == ["head"]:
            others.add(id(param))
        if getattr(param, "use_muon", False) and param.dim() != 2:
            raise ValueError(
                f"{name}.use_muon: expected a parameter of two dimensions, found {param.dim()}: Muon updates only "
                "matrices; remove use_muon, then AdamW updates the parameter"
            )

    def is_matrix(param: nn.Parameter) -> bool:
        return bool(getattr(param, "use_muon", param.dim() == 2 and id(param) not in others))

    matrices = [param for param in trained if is_matrix(param)]
    rest = [param for param in trained if not is_matrix(param)]
    adam = {**options, "lr": options["lr"] if options["adam_lr"] is None else options["adam_lr"]}
    return [
        {"params": matrices, **options, "is_matrix": True, "is_other": False},
        {"params": rest, **adam, "is_matrix": False, "is_other": True},
    ]


def _do_nothing(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None: ...


_NOTHING = Optimizer("None", text="", keys={}, states=(), apply=_do_nothing, keeps_step=False)
"""The optimizer of an engine without one: it has no parameters."""


def _check_needs_none(config: Config) -> None:
    """Raise ValueError if the config describes a training."""
    zero = config.zero_optimization
    wants = {
        "scheduler": config.scheduler is not None,
        "gradient_clipping": bool(config.gradient_clipping),
        "zero_optimization.offload_optimizer": zero.offload_optimizer.is_used,
        "zero_optimization.update_in_backward": zero.update_in_backward,
    }
    found = [key for key, is_wanted in wants.items() if is_wanted]
    if found:
        raise ValueError(
            f"optimizer: {found[0]} needs an optimizer, found none; set it in the config, for example "
            '{"type": "adamw", "params": {"lr": 1e-3}}, or pass it to initialize(..., optimizer=...)'
        )


def _check_by_element(choice: object) -> None:
    """Raise ValueError for torch's class of an optimizer that updates whole parameters and that the config has."""
    cls = choice if isinstance(choice, type) else choice.func if isinstance(choice, partial) else type(choice)
    record = OPTIMIZERS.get(str(getattr(cls, "__name__", "")).lower())
    if record is not None and record.whole is not None:
        raise ValueError(
            f"optimizer: expected a torch optimizer that updates each element by itself, found {cls.__name__}, which "
            f'updates whole parameters; set "optimizer": {{"type": "{record.name}", "params": {{...}}}} in the config, '
            "which divides the work over the ranks"
        )


def _check_members(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    members, known = [param for group in optimizer.param_groups for param in group["params"]], set(map(id, params))
    extra = sum(id(param) not in known for param in members)
    if extra or not members:
        raise ValueError(
            f"optimizer: expected parameters of the model ({len(params)}), found {len(members)} parameters, "
            f"{extra} not in the model; build the optimizer on some or all of model.parameters()"
        )


def optimizer_backend(config: Config) -> Backend:
    """Return the kernel backend of the optimizer. States in host memory are updated by the host, without Triton."""
    backend = config.kernels.backend_of("optimizer_step")
    return "auto" if backend == "triton" and config.zero_optimization.offload_optimizer.is_used else backend
