"""Put fused kernels into an existing model by changing the class of its modules (`fuse_model`).

    LlamaRMSNorm <- LlamaRMSNorm, a generated subclass with the same name and a fused forward

Parameters, buffers, hooks and names do not change, so state dicts, optimizers, checkpoints and isinstance see no
difference. A pickled model is fused again when it is loaded. An override of `forward` on a module would be simpler, but
Hugging Face sets and deletes overrides of `forward`. A different model of the same class is not affected. The table in
`fusions.py` lists the replaced modules. No parameter is read: the model may be on the meta device, or sharded later.
"""

from __future__ import annotations

import copyreg
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

from torch import nn

from .dispatch import Backend, has_triton
from .fusions import COMPILED_FUSIONS, FUSIONS, MEMBERS, Fusion, fusions_of

logger = logging.getLogger("lowtide")
NOT_FOUND = "the model has no known module of that kind"
_ORIGIN = "_lowtide_origin"  # attribute of generated classes: its Origin
_PICKLE_PROTOCOL = 2  # the first that stores an object's state apart from its class
Origin = tuple[type[nn.Module], tuple[Fusion, ...]]
"""Original class and fusions of a generated class; a class of others has no fusions."""


@dataclass(frozen=True)
class Fused:
    """A replaced module."""

    name: str  # in the model; "" for the model itself
    class_name: str
    kernel: str  # of `fusions.FUSIONS`


def fuse_model(
    model: nn.Module,
    *,
    modules: Literal["auto"] | Sequence[str] = "auto",
    backend: Backend | Mapping[str, Backend] = "auto",
) -> list[Fused]:
    """Replace all known modules of `model` by fused kernels. Logs a line per kind, and returns the replaced modules.

    modules: "auto" for all of `fusions.FUSIONS`, or a list of names. If "linear_cross_entropy" is named, every training
    forward with labels returns no logits; with "auto", only within `loss_only()`, as in `engine.train_step`.
    backend: of all kernels, or by fusion; the default is "auto".
    A second call with the same arguments changes nothing and returns an empty list. A call with a new backend changes
    the backend. Subclasses of known classes, and modules whose forward was replaced, do not change.
    Raises ValueError for unknown names, and for "triton" if the package is not installed.
    """
    names = _checked_names(modules)
    backends = _checked_backends(backend, names)
    fused, missing = replace_modules(model, names, backends, modules != "auto", _exchange_class)
    for line in lines_of(fused):
        logger.info("%s", line)
    for name in missing if modules != "auto" else ():
        logger.warning("fuse_model: %s has no effect here: %s", name, NOT_FOUND)
    return fused


def replace_modules(
    model: nn.Module,
    names: Sequence[str],
    backends: Mapping[str, Backend],
    always_fuses_loss: bool,
    exchange: Callable[[nn.Module, type[nn.Module]], None],
    compiled: Collection[nn.Module] = (),
) -> tuple[list[Fused], list[str]]:
    """Replace modules as `fuse_model`, without checks and log. Returns replaced modules, and names without a module.

    names: of fusions. backends: of at least these fusions. always_fuses_loss: True to leave out logits in every
    training forward, False only within `loss_only()`. exchange: sets the class of a module. compiled: inside these
    modules a compiler fuses, so COMPILED_FUSIONS are left out.
    """
    inside_compiled = {id(part) for module in compiled for part in module.modules()}
    fused: list[Fused] = []
    heads: list[nn.Module] = []
    seen: set[str] = set()
    # A list, as the loop changes classes while the model is walked.
    for name, module in list(model.named_modules()):
        original, before = _origin(type(module))
        left_out = COMPILED_FUSIONS if id(module) in inside_compiled else ()
        wanted = {key: backends[key] for key in names if key not in left_out}
        found = fusions_of(module, original, wanted, always_fuses_loss)
        seen |= {fusion.kernel for fusion in found}
        # Fusions of an earlier call with different names stay.
        kept = [fusion for fusion in before if fusion.kernel not in names]
        # Sorted: `_fused_class` caches classes by it, and a second call must find what it made.
        after = tuple(sorted((*found, *kept), key=lambda fusion: FUSIONS.index(fusion.kernel)))
        if not found or after == before:
            continue
        exchange(module, _fused_class((original, after)))
        new = [fusion for fusion in found if fusion not in before]
        fused += [Fused(name, original.__name__, fusion.kernel) for fusion in new]
        if any(fusion.kernel == "linear_cross_entropy" for fusion in found):
            heads.append(module.get_submodule("lm_head"))
    for head in heads:
        fusion = Fusion("linear_cross_entropy", "head", "", backends["linear_cross_entropy"])
        exchange(head, _fused_class((_origin(type(head))[0], (fusion,))))
    return fused, [name for name in names if name not in seen]


def _exchange_class(module: nn.Module, cls: type[nn.Module]) -> None:
    module.__class__ = cls


def lines_of(fused: Sequence[Fused]) -> list[str]:
    """Write a log line per kind of replaced modules: "fused 65 x LlamaRMSNorm (rms_norm)"."""
    counts = Counter((module.class_name, module.kernel) for module in fused)
    return [f"fused {count} x {class_name} ({kernel})" for (class_name, kernel), count in counts.items()]


def _checked_names(modules: Literal["auto"] | Sequence[str]) -> tuple[str, ...]:
    if modules == "auto":
        return FUSIONS
    names = [modules] if isinstance(modules, str) else list(modules)
    unknown = [name for name in names if name not in FUSIONS]
    if unknown:
        raise ValueError(
            f'fuse_model: expected modules "auto" or a list of {_quoted(FUSIONS)}; found {_quoted(unknown)}'
        )
    return tuple(names)


def _checked_backends(backend: Backend | Mapping[str, Backend], wanted: Sequence[str]) -> dict[str, Backend]:
    """Return the backend of each wanted fusion. Raises ValueError for unknown names and impossible backends."""
    by_name = dict(backend) if isinstance(backend, Mapping) else dict.fromkeys(FUSIONS, backend)
    unknown = [name for name in by_name if name not in FUSIONS]
    if unknown:
        raise ValueError(f"fuse_model: expected backends of {_quoted(FUSIONS)}; found {_quoted(unknown)}")
    bad = [value for value in by_name.values() if value not in get_args(Backend)]
    if bad:
        raise ValueError(f'fuse_model: expected a backend of {_quoted(get_args(Backend))}, found "{bad[0]}"')
    backends: dict[str, Backend] = {name: by_name.get(name, "auto") for name in wanted}
    if "triton" in backends.values() and not has_triton():
        raise ValueError('fuse_model: backend "triton" needs the package triton; install it, or use "auto"')
    return backends


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _origin(cls: type[nn.Module]) -> Origin:
    # `vars`, not getattr: a user's subclass of a generated class would inherit the attribute, and lose its changes.
    origin: Origin = vars(cls).get(_ORIGIN, (cls, ()))
    return origin


@cache
def _fused_class(origin: Origin) -> type[nn.Module]:
    """Make a subclass with the original's name: Hugging Face writes and compares names of classes."""
    original, fusions = origin

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        reduced = original.__reduce_ex__(self, max(int(protocol), _PICKLE_PROTOCOL))
        assert isinstance(reduced, tuple) and reduced[0] is copyreg.__newobj__  # type: ignore[attr-defined]
        return _new, (origin,), *reduced[2:]

    members: dict[str, Any] = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__reduce_ex__": reduce,
        _ORIGIN: origin,
    }
    for fusion in fusions:
        members |= MEMBERS[fusion.form](original, fusion)
    return type(original.__name__, (original,), members)


def _new(origin: Origin) -> nn.Module:
    """Make an empty module of the fused class, for pickle and deepcopy."""
    cls = _fused_class(origin)
    return cls.__new__(cls)
