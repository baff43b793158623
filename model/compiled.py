"""torch.compile for a model with hooks: forwards are compiled, and the hooks run outside.

[Note: what is compiled]
Hooks wait for other ranks, and change the class and the memory of parameters. A compiler that traces them breaks its
graph, recompiles, or fails. So if the user compiles a module, only its forward is compiled. If the module contains
units, the forward of each unit is compiled, and of each largest module that contains no unit:

    torch.compile(model)      embedding     block 0     block 1     norm     head      a graph each
                              eager: the forwards of the model and of its containers around these

All parameters are gathered when a compiled forward begins, so torch's guards see them as at compile time. The
wrapper of torch.compile(module) is removed meanwhile, so names contain no "_orig_mod".

[Note: caches]
A key-value cache has a place for each block, so each block would compile its graph, and torch stops for all blocks
after 8 graphs (`recompile_limit`). So a call of the model makes no cache by default, as a trained model has no use
for it, and a block that is given a cache, as in `generate`, runs its forward uncompiled.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .blocks import has_forward
from .caches import configs_of, is_cache, without_caches
from .patches import ModelPatches
from .recomputing import Recomputing

_frames = torch._C._dynamo.eval_frame  # directly from C: importing torch._dynamo takes a second

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Compile a function with the user's options."""


class Compiled:
    """The modules of a model to compile, with their options. See [Note: what is compiled]."""

    def __init__(self, model: nn.Module, patches: ModelPatches, loads: bool = False) -> None:
        """Remove torch's wrappers from the model until the patches are undone. `module` is the model without them.

        loads: import the compiler now, because something beside the model will be compiled.
        """
        if loads:
            importlib.import_module("torch._dynamo")
        self._patches = patches
        self._wanted: dict[int, tuple[nn.Module, Compile]] = {}
        self._possible: set[int] | None = None  # ids of modules; None: all
        self._makes_caches = True
        self.module = model
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled yet, and the import would take a second
            self.module = self._unwrapped(model)
            self._take_out(self.module)

    @property
    def wanted(self) -> list[nn.Module]:
        """The modules that the user asked to compile."""
        return [module for module, _ in self._wanted.values()]

    def want(self, modules: Iterable[nn.Module], make: Compile) -> None:
        """Compile these modules too, unless the user has given options for them."""
        for module in modules:
            self._wanted.setdefault(id(module), (module, make))

    def apply(self, units: Collection[nn.Module], blocks: Iterable[nn.Module] | None = None) -> int:
        """Compile the forwards of the wanted modules, now and on later calls of `module.compile()`.

        units: modules whose hooks must not be traced. blocks: with a pipeline, since its stages run the code outside of
        its blocks on absent tensors: nothing else is compiled. Returns the number of wanted modules that contain units.
        """
        if blocks is not None:
            self._possible = {id(module) for block in blocks for module in block.modules()}
        inner = {id(unit) for unit in units}
        done: set[int] = set()
        divided = 0
        # Inner modules first: options of a module take precedence over options of a module around it.
        for module, make in sorted(self._wanted.values(), key=lambda wish: sum(1 for _ in wish[0].modules())):
            parts = [part for part in _parts(module, inner) if id(part) not in done]
            divided += parts != [module]
            done.update(map(id, parts))
            self._compile(parts, make)
        if self._wanted:
            self._make_no_caches()
        for module in _outside(self.module, inner):
            self._patches.override(module, "compile", _compiling(self, module, inner))
            self._patches.override(module, "__call__", _refusing_to_be_traced(module))
        return divided

    def compile(self, module: nn.Module, inner: Collection[int], make: Compile) -> None:
        """Compile a module, for `module.compile()`."""
        self._compile(list(_parts(module, inner)), make)
        self._make_no_caches()

    def _make_no_caches(self) -> None:
        """Let calls of the model make no cache by default. See [Note: caches]."""
        configs, forward = configs_of(self.module), self.module.forward
        if not self._makes_caches or not any(hasattr(config, "use_cache") for config in configs):
            return
        self._makes_caches = False

        @functools.wraps(forward)
        def without(*args: Any, **kwargs: Any) -> Any:
            with without_caches(configs):
                return forward(*args, **kwargs)

        self._patches.override(self.module, "forward", without)

    def _compile(self, parts: list[nn.Module], make: Compile) -> None:
        for part in parts:
            if self._possible is not None and id(part) not in self._possible:
                continue
            forward: Any = part.forward
            # Compile inside of `Recomputing`, so the recomputation runs the compiled forward.
            inner = forward.forward if isinstance(forward, Recomputing) else forward
            if getattr(inner, "_torchdynamo_disable", False):  # `untraced`: torch.compile around it would trace it
                continue
            compiled = _unless_cached(make(inner), inner)
            new = replace(forward, forward=compiled) if isinstance(forward, Recomputing) else compiled
            self._patches.override(part, "forward", new)

    # -- removal of torch's wrappers ------------------------------------------------------------------------------

    def _unwrapped(self, module: nn.Module) -> nn.Module:
        from torch._dynamo import OptimizedModule

        while isinstance(module, OptimizedModule):
            inner = module._orig_mod
            self._wanted.setdefault(id(inner), (inner, module.dynamo_ctx))
            self._patches.override(module, "forward", inner.__call__)  # calls of the old wrapper reach the hooks
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
                # `module(...)` would call it, and so run a graph that has traced the hooks.
                self._patches.override(module, "_compiled_call_impl", None)
                make = _options_of(call)
                if make is not None:
                    self._wanted[id(module)] = module, make


def _parts(module: nn.Module, units: Collection[int]) -> Iterator[nn.Module]:
    """Yield the modules to compile: units, and the outermost modules that contain none. units: ids of modules."""
    holds_units = any(id(part) in units for part in module.modules() if part is not module)
    if id(module) in units or (has_forward(module) and not holds_units):
        yield module
        return
    for child in module.children():
        yield from _parts(child, units)


def _outside(module: nn.Module, units: Collection[int]) -> Iterator[nn.Module]:
    """Yield all modules except those inside of units."""
    yield module
    if id(module) not in units:
        for child in module.children():
            yield from _outside(child, units)


def _compiling(compiled: Compiled, module: nn.Module, units: Collection[int]) -> Callable[..., None]:
    def compile(*args: Any, **kwargs: Any) -> None:
        """Compile like `nn.Module.compile`, as described in [Note: what is compiled]."""
        compiled.compile(module, units, lambda function: torch.compile(function, *args, **kwargs))

    return compile


def _unless_cached(compiled: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    """Call `compiled`, or `forward` if an argument is a cache. See [Note: caches]."""

    @functools.wraps(compiled)  # with the mark by which a later torch.compile finds `forward` in it
    def run(*args: Any, **kwargs: Any) -> Any:
        cached = any(map(is_cache, args)) or any(map(is_cache, kwargs.values()))
        return (forward if cached else compiled)(*args, **kwargs)

    return run


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude the function from compiled graphs. Returns it unchanged if the compiler is not loaded."""
    if "torch._dynamo" not in sys.modules:  # the import takes a second
        return function
    disable: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.compiler.disable
    return disable(function)


def refuse_to_be_traced(what: str) -> None:
    """Raise RuntimeError if a compiler traces this call. what: the called object, for users."""
    # None: no compiler is active. False: compiled code runs, and nothing is traced.
    if _frames.get_eval_frame_callback() not in (None, False):
        raise RuntimeError(
            f"torch.compile of {what}: expected its compile(...), found a wrapper that would also trace the engine's "
            "hooks. Call compile(...) of engine.module or of a part such as a block, or compile the model before "
            "lowtide.initialize, and then call engine(...)."
        )


def _refusing_to_be_traced(module: nn.Module) -> Callable[..., Any]:
    """Make a `module.__call__` that torch.compile(module) would wrap. `module(...)` does not call it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        refuse_to_be_traced(f"a {type(module).__name__} that an engine trains")
        return type(module).__call__(module, *args, **kwargs)

    return call


def _putting_back(parent: nn.Module, name: str, inner: nn.Module | None, child: nn.Module | None) -> Callable[[], None]:
    def put_back() -> None:
        # Else the user has put another module in its place since. It stays.
        if parent._modules.get(name) is inner:
            parent._modules[name] = child

    return put_back


def _options_of(call: Any) -> Compile | None:
    """Return the compile function behind `module.compile()`, or None for disable=True. Raises ValueError."""
    if getattr(call, "__name__", "") == "_call_impl" and hasattr(call, "__self__"):
        return None
    names = getattr(getattr(call, "__code__", None), "co_freevars", ())
    if "self" not in names:  # torch._dynamo's wrapper refers to its context as `self`
        raise ValueError(
            f"model: expected a module compiled by module.compile(), found {type(call).__name__} as its "
            "_compiled_call_impl. Compile it after lowtide.initialize, by engine.module.compile()."
        )
    context: Compile = call.__closure__[names.index("self")].cell_contents
    return context
