"""`deepspeed.zero`, and the functions of `deepspeed.utils` for single parameters.

Before `initialize` a parameter is a plain tensor, whole on every rank, or divided by `zero.Init`. After it, the engine
has the parameter's master weights, states and gradient. All ranks must call functions that get or set full values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum, StrEnum
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from . import comm
from .divided import DividedParameters, table_of
from .owners import owner_of, owner_or_error

GRADIENT_KEY = "gradient"


ZeroParamType = Enum("ZeroParamType", ["NORMAL", "PARTITIONED", "REMOTE"])
"""DeepSpeed's kinds of parameters."""

OffloadDeviceEnum = StrEnum("OffloadDeviceEnum", ["none", "cpu", "nvme"])
"""Values of `offload_optimizer.device` and `offload_param.device`."""


class GatheredParameters:
    """A context with full parameters. With a `modifier_rank`, that rank may change them for all ranks.

    params: a parameter, several, or a module's. Parameters without an engine stay as they are. At the end, changes
    reach all ranks and the master weights.
    """

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = [params] if isinstance(params, Tensor) else list(params) if enabled else []
        # By id: tensors compare by value, and a tied parameter may be given twice.
        self._params: list[Any] = list({id(param): param for param in given if isinstance(param, Tensor)}.values())
        self._divided: dict[int, tuple[DividedParameters, list[nn.Parameter]]] = {}
        self._modifier_rank = modifier_rank
        self._open: ExitStack | None = None

    def __enter__(self) -> None:
        by_engine: dict[int, tuple[Any, list[Any]]] = {}
        for param in self._params:
            engine, table = owner_of(param), table_of(param)
            if engine is not None:
                by_engine.setdefault(id(engine), (engine, []))[1].append(param)
            elif table is not None:
                self._divided.setdefault(id(table), (table, []))[1].append(param)
        for table, params in self._divided.values():
            table.open(params, gathered=True)
        with ExitStack() as stack:
            for engine, params in by_engine.values():
                stack.enter_context(engine.gathered(*params, modify=self._modifier_rank is not None))
            self._open = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        assert self._open is not None
        # Before the engine's context ends: it wants the same changes on every rank.
        if self._modifier_rank is not None and error[0] is None and comm.is_initialized():
            for param in self._params:
                if owner_of(param) is not None:
                    comm.broadcast(param.data, src=self._modifier_rank)
        self._open.__exit__(*error)
        # After an error ranks may be at different places, and this is a collective.
        for table, params in self._divided.values() if error[0] is None else ():
            table.close_gathered(params, self._modifier_rank)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Check the type of `parameter`, and do nothing else: it is full in any module's forward.

    Raises RuntimeError if it is no parameter.
    """
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError(f"register_external_parameter: expected a parameter, found {type(parameter).__name__}")


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing: see `register_external_parameter`."""


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """Open a context with full parameters to generate with, and yield the engine's module. All ranks must enter it."""
    module = model.module if hasattr(model, "lowtide") else model
    with GatheredParameters(module.parameters()):
        yield module


def is_zero_param(parameter: Any) -> bool:
    """Return whether an engine of stage 3 or zero.Init has divided the parameter."""
    if isinstance(parameter, nn.Parameter) and table_of(parameter) is not None:
        return True
    engine = owner_of(parameter) if isinstance(parameter, nn.Parameter) else None
    return engine is not None and engine.config.zero_optimization.stage == 3


# -- values of one parameter ------------------------------------------------------------------------------------------


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return the master weights in the parameter's shape; None if it is not trained. All ranks must call it."""
    return _get(param, None, "safe_get_full_fp32_param", local=False)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return a state like "exp_avg" in the parameter's shape; None if it is not trained. All ranks must call it.

    Raises ValueError for a state that the optimizer does not have.
    """
    return _get(param, optim_state_key, "safe_get_full_optimizer_state", local=False)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the gradient, the mean over microbatches and ranks, in the parameter's shape; None if it is not trained.

    Valid between a backward and the `step` that uses it. Between the microbatches of a step it is the sum so far.
    Raises StateError at all further times. All ranks must call it.
    """
    return owner_or_error(param, "safe_get_full_grad").gradient(param)


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return this rank's part of the master weights, (n,), in the order of the flattened parameter. n may be 0."""
    return _get(param, None, "safe_get_local_fp32_param", local=True)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return this rank's part of a state, as `safe_get_local_fp32_param` does."""
    return _get(param, optim_state_key, "safe_get_local_optimizer_state", local=True)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Return this rank's part of the gradient: see `safe_get_full_grad` and `safe_get_local_fp32_param`."""
    return owner_or_error(param, "safe_get_local_grad").gradient(param, local=True)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set the parameter and its master weights to rank 0's value. All ranks must call it."""
    owner_or_error(param, "safe_set_full_fp32_param").set_full(param, value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set a state to rank 0's value. All ranks must call it."""
    owner_or_error(param, "safe_set_full_optimizer_state").set_full(param, value, optim_state_key)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set the gradient to rank 0's value, when `safe_get_full_grad` is valid. All ranks must call it."""
    owner_or_error(param, "safe_set_full_grad").set_gradient(param, value)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's part of the parameter and its master weights. All ranks must call it."""
    owner_or_error(param, "safe_set_local_fp32_param").set_local(param, value)


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set this rank's part of a state. All ranks must call it."""
    owner_or_error(param, "safe_set_local_optimizer_state").set_local(param, value, optim_state_key)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's part of the gradient. All ranks must call it."""
    owner_or_error(param, "safe_set_local_grad").set_gradient(param, value, local=True)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Set each gradient to update_func(gradient, param)."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def _get(param: nn.Parameter, state: str | None, call: str, *, local: bool) -> Tensor | None:
    engine = owner_or_error(param, call)
    if not param.requires_grad:
        return None
    return engine.local(param, state) if local else engine.full(param, state)


# -- leaf modules -----------------------------------------------------------------------------------------------------

# Modules that were set. Leaf modules need no treatment here: the order of gathers is fixed, even for skipped modules.
_LEAVES: WeakSet[nn.Module] = WeakSet()


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Sequence[Any], raise_if_not_found: bool = True) -> Any:
    """Return the modules of these classes or class names, and remember them as leaves without any effect.

    Raises ValueError without a match.
    """
    return _set_leaves(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: Sequence[Any], raise_if_not_found: bool = True) -> Any:
    """Forget the leaf modules of these classes: see `set_z3_leaf_modules`."""
    return _set_leaves(model, leaf_module_classes, False, raise_if_not_found)


def _set_leaves(model: nn.Module, classes: Sequence[Any], flag: bool, raise_if_not_found: bool) -> list[nn.Module]:
    found = [module for module in model.modules() if _is_one_of(module, classes)]
    if not found and raise_if_not_found:
        raise ValueError(f"set_z3_leaf_modules: expected modules of {list(classes)}, found none in the model")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Return (the modules of these names, names without a module): see `set_z3_leaf_modules`, also for ValueError."""
    return _set_named(model, module_names, str.__eq__, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Return the modules with names that end so, as `set_z3_leaf_modules_by_name` does."""
    return _set_named(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def _set_named(
    model: nn.Module, wanted: Sequence[str], is_meant: Callable[[str, str], bool], flag: bool, raise_if_not_found: bool
) -> tuple[list[nn.Module], list[str]]:
    named = list(model.named_modules())
    found = {text: [module for name, module in named if is_meant(name, text)] for text in wanted}
    missing = [text for text, modules in found.items() if not modules]
    if missing and raise_if_not_found:
        raise ValueError(f"set_z3_leaf_modules: expected modules named {missing}, found none in the model")
    leaves = list(dict.fromkeys(module for modules in found.values() for module in modules))
    for module in leaves:
        set_z3_leaf_module(module, flag)
    return leaves, missing


def set_leaves_of(model: nn.Module, section: Mapping[str, Any]) -> None:
    """Set the leaf modules of zero_optimization.leaf_module in a config: `classes`, `names`, `name_suffixes`."""
    classes, names, suffixes = (
        [given] if isinstance(given, str) else given
        for given in (section.get(key) or [] for key in ("classes", "names", "name_suffixes"))
    )
    set_z3_leaf_modules(model, classes, raise_if_not_found=False)
    set_z3_leaf_modules_by_name(model, names, raise_if_not_found=False)
    set_z3_leaf_modules_by_suffix(model, suffixes, raise_if_not_found=False)


def set_z3_leaf_module(model: nn.Module, flag: bool = True) -> None:
    """Set or forget a single leaf module: see `set_z3_leaf_modules`."""
    if flag:
        _LEAVES.add(model)
    else:
        _LEAVES.discard(model)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the leaf modules of the model."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether the module is a leaf."""
    return model in _LEAVES


def z3_leaf_parameter(parameter: nn.Parameter) -> bool:
    """Return whether the parameter belongs to a leaf module."""
    return any(param is parameter for module in _LEAVES for param in module.parameters())


def _is_one_of(module: nn.Module, classes: Sequence[Any]) -> bool:
    names = {type(module).__name__, f"{type(module).__module__}.{type(module).__qualname__}"}
    return any(cls in names if isinstance(cls, str) else isinstance(module, cls) for cls in classes)


def is_moe_param(param: Tensor) -> bool:
    """Return whether DeepSpeed's MoE marks the parameter (`allreduce` False): not all ranks have it."""
    return not getattr(param, "allreduce", True)


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return (False, 0): DeepSpeed's MoE layers do not exist here."""
    return False, 0


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Iterable[Mapping[str, Any]], max_group_size: float = 178956971
) -> list[dict[str, Any]]:
    """Return the groups unchanged. Raises NotImplementedError for a parameter that not all ranks have."""
    groups = [param_groups] if isinstance(param_groups, Mapping) else list(param_groups)
    found = [{**group, "params": list(group["params"])} for group in groups]
    for group in found:
        refuse_moe_params(group["params"])
    return found


def refuse_moe_params(params: Iterable[Any]) -> None:
    """Raise NotImplementedError for a parameter that not all ranks have."""
    found = sum(is_moe_param(param) for param in params)
    if found:
        raise NotImplementedError(
            f"model_parameters: expected parameters that all ranks have, found {found} with allreduce=False, the "
            'mark of DeepSpeed\'s MoE. Build all experts on each rank, and set "parallel": {"expert": N}'
        )
