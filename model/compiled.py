"""torch.compile on a model with hooks: forwards are compiled, and hooks stand around them.

[Note: what is compiled]
Hooks wait for other ranks, and change the class and the memory of parameters. A compiler that traces them breaks its
graph there, recompiles, or fails. So where a user has asked for a module to be compiled, what is compiled is its
forward, and hooks are outside; of a module that holds units, the forward of each unit and of each outermost part beside
them:

    torch.compile(model)      embedding     block 0     block 1     norm     head      one graph each
                              eager: what the forwards of the model and of its containers do between them

Parameters are all there when a compiled forward begins, so guards see what they saw when it was compiled. The wrapper
that torch.compile(module) puts around a module is taken out meanwhile: names have no "_orig_mod" in them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .blocks import has_forward
from .patches import ModelPatches
from .recomputing import Recomputing

_frames = torch._C._dynamo.eval_frame  # of the interpreter: importing torch._dynamo costs a second

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Gives the compiled form of a function, as the user's options say."""


class Compiled:
    """Which modules of a model are to be compiled, and how; see [Note: what is compiled]."""

    def __init__(self, model: nn.Module, patches: ModelPatches, loads: bool = False) -> None:
        """Takes torch's wrappers out of the model; the ledger puts them back. `module` is the model without them.

        loads: something will be compiled that the model does not say: the compiler is there from now on.
        """
        if loads:
            importlib.import_module("torch._dynamo")
        self._patches = patches
        self._wanted: dict[int, tuple[nn.Module, Compile]] = {}
        self.module = model
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and importing it costs a second
            self.module = self._unwrapped(model)
            self._take_out(self.module)

    @property
    def is_wanted(self) -> bool:
        """Whether anything of the model is to be compiled."""
        return bool(self._wanted)

    def want(self, modules: Iterable[nn.Module], make: Compile) -> None:
        """These too, where the caller has not said how."""
        for module in modules:
            self._wanted.setdefault(id(module), (module, make))

    def apply(self, units: Collection[nn.Module]) -> int:
        """Compiles the forwards of what is wanted; and of what `module.compile()` asks for from now on.

        units: what has hooks that must not be traced. Returns how many modules hold units and are to be compiled.
        """
        inner = {id(unit) for unit in units}
        done: set[int] = set()
        divided = 0
        # A module's own options before those of a module around it.
        for module, make in sorted(self._wanted.values(), key=lambda wish: sum(1 for _ in wish[0].modules())):
            parts = [part for part in _parts(module, inner) if id(part) not in done]
            divided += parts != [module]
            done.update(map(id, parts))
            self._compile(parts, make)
        for module in _outside(self.module, inner):
            self._patches.override(module, "compile", _compiling(self, module, inner))
            self._patches.override(module, "__call__", _refusing_to_be_traced(module))
        return divided

    def compile(self, module: nn.Module, inner: Collection[int], make: Compile) -> None:
        """What `module.compile()` does."""
        self._compile(list(_parts(module, inner)), make)

    def _compile(self, parts: list[nn.Module], make: Compile) -> None:
        for part in parts:
            forward: Any = part.forward
            if isinstance(forward, Recomputing):  # what is recomputed is what was compiled
                compiled: Any = replace(forward, forward=make(forward.forward))
            else:
                compiled = make(forward)
            self._patches.override(part, "forward", compiled)

    # -- what torch.compile has put there -------------------------------------------------------------------------

    def _unwrapped(self, module: nn.Module) -> nn.Module:
        from torch._dynamo import OptimizedModule

        while isinstance(module, OptimizedModule):
            inner = module._orig_mod
            self._wanted.setdefault(id(inner), (inner, module.dynamo_ctx))
            self._patches.override(module, "forward", inner.__call__)  # whoever still calls it comes to the hooks
            module = inner
        return module

    def _take_out(self, model: nn.Module) -> None:
        for parent in list(model.modules()):
            for name, child in list(parent._modules.items()):
                inner = None if child is None else self._unwrapped(child)
                if inner is not child:
                    parent._modules[name] = inner
                    self._patches.callback(_putting_back(parent, name, inner, child))
        for module in model.modules():
            call = module._compiled_call_impl
            if call is not None:
                self._patches.override(module, "_compiled_call_impl", None)
                make = _options_of(call)
                if make is not None:
                    self._wanted[id(module)] = module, make


def _parts(module: nn.Module, units: Collection[int]) -> Iterator[nn.Module]:
    """What runs as one: units, and the outermost modules that hold none. units: their identities."""
    holds_units = any(id(part) in units for part in module.modules() if part is not module)
    if id(module) in units or (has_forward(module) and not holds_units):
        yield module
        return
    for child in module.children():
        yield from _parts(child, units)


def _outside(module: nn.Module, units: Collection[int]) -> Iterator[nn.Module]:
    """All modules but those inside of units."""
    yield module
    if id(module) not in units:
        for child in module.children():
            yield from _outside(child, units)


def _compiling(compiled: Compiled, module: nn.Module, units: Collection[int]) -> Callable[..., None]:
    def compile(*args: Any, **kwargs: Any) -> None:
        """As `nn.Module.compile`, of what [Note: what is compiled] says."""
        compiled.compile(module, units, lambda function: torch.compile(function, *args, **kwargs))

    return compile


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, into which no compiler goes: graphs break there. Where the compiler is not loaded, as it is."""
    if "torch._dynamo" not in sys.modules:  # loading it takes a second
        return function
    disable: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.compiler.disable
    return disable(function)


def refuse_to_be_traced(what: str) -> None:
    """Raises RuntimeError where a compiler follows this call. what: is called, as users read it."""
    if _frames.get_eval_frame_callback() not in (None, False):
        raise RuntimeError(
            f"torch.compile of {what}: expected its compile(...), found a wrapper that would trace the engine's hooks "
            "as well; call engine.module.compile(...), or that of a part such as a block, or compile the model before "
            "lowtide.initialize, and go on with engine(...)"
        )


def _refusing_to_be_traced(module: nn.Module) -> Callable[..., Any]:
    """What `module.__call__` is, of which torch.compile(module) makes a wrapper. `module(...)` does not come here."""

    def call(*args: Any, **kwargs: Any) -> Any:
        refuse_to_be_traced(f"a {type(module).__name__} that an engine trains")
        return type(module).__call__(module, *args, **kwargs)

    return call


def _putting_back(parent: nn.Module, name: str, inner: nn.Module | None, child: nn.Module | None) -> Callable[[], None]:
    def put_back() -> None:
        if parent._modules.get(name) is inner:
            parent._modules[name] = child

    return put_back


def _options_of(call: Any) -> Compile | None:
    """Of what `module.compile()` has made; None where it compiles nothing (disable=True). Raises ValueError."""
    if getattr(call, "__name__", "") == "_call_impl" and hasattr(call, "__self__"):
        return None
    names = getattr(getattr(call, "__code__", None), "co_freevars", ())
    if "self" not in names:  # the context of torch._dynamo, which its wrapper refers to
        raise ValueError(
            f"model: expected a module that torch has compiled (module.compile()), found {type(call).__name__} as its "
            "_compiled_call_impl; compile it after lowtide.initialize, by engine.module.compile()"
        )
    context: Compile = call.__closure__[names.index("self")].cell_contents
    return context
