"""Puts fused kernels into a model that is there already: modules get another class, and keep all else.

    LlamaRMSNorm <- LlamaRMSNorm, a subclass made here with the same name and another forward

Parameters, buffers, hooks and names stay as they are, so state dicts, optimizers, checkpoints and isinstance see no
difference, and a model saved with pickle is fused again where it is loaded. An override of `forward` on a module would
be simpler, but Hugging Face sets and deletes such overrides itself. Nothing global is patched: another model of the
same class is untouched. Which modules are replaced, and by what, is the table in `fusions.py`.

No value of a parameter is read: the model may be on the meta device, or sharded later.
"""

from __future__ import annotations

import copyreg
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

from torch import nn

from .dispatch import Backend, has_triton
from .fusions import FUSIONS, Fusion, fusions_of, head_fusions, members_of

logger = logging.getLogger("lowtide")
NOT_FOUND = "the model has no module of that kind that is known"
_ORIGIN = "_lowtide_origin"  # the _Origin of generated classes
_PICKLE_PROTOCOL = 2  # the first in which an object's state stands apart from its class


@dataclass(frozen=True)
class Fused:
    """One module that was replaced."""

    name: str  # in the model, "" for the model itself
    class_name: str
    kernel: str  # one of `fusions.FUSIONS`


@dataclass(frozen=True)
class _Origin:
    """What a fused class is made of."""

    cls: type[nn.Module]
    fusions: tuple[Fusion, ...]  # none: cls itself


def fuse_model(
    model: nn.Module,
    *,
    modules: Literal["auto"] | Sequence[str] = "auto",
    backend: Backend | Mapping[str, Backend] = "auto",
) -> list[Fused]:
    """Replaces what the fused kernels know in `model`, and logs it, one line a kind. Returns what was replaced.

    modules: "auto" for all of `fusions.FUSIONS`, or those that are wanted. Named here, "linear_cross_entropy" acts
    whenever the model is trained with labels, and the output then has no logits; with "auto" only within
    `loss_only()`, as in `engine.train_step`. backend: of all kernels, or by fusion; those not named are "auto".

    A second call with the same arguments changes nothing and returns nothing; one with another backend replaces it.
    Subclasses of what is known, and modules whose forward someone else has replaced, are left alone.
    Raises ValueError for unknown names, and for "triton" where the package is not installed.
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
) -> tuple[list[Fused], list[str]]:
    """As `fuse_model`, without its checks and its log: what was replaced, and the names for which nothing was found.

    names: of the fusions; backends: of at least these. always_fuses_loss: else only within `loss_only()`. exchange:
    gives a module its new class.
    """
    fused: list[Fused] = []
    heads: list[nn.Module] = []
    seen: set[str] = set()
    for name, module in list(model.named_modules()):
        origin = _origin(type(module))
        found = fusions_of(module, origin.cls, {key: backends[key] for key in names}, always_fuses_loss)
        seen |= {fusion.kernel for fusion in found}
        kept = [fusion for fusion in origin.fusions if fusion.kernel not in names]
        after = tuple(sorted((*found, *kept), key=lambda fusion: FUSIONS.index(fusion.kernel)))
        if not found or after == origin.fusions:
            continue
        exchange(module, _fused_class(_Origin(origin.cls, after)))
        new = [fusion for fusion in found if fusion not in origin.fusions]
        fused += [Fused(name, origin.cls.__name__, fusion.kernel) for fusion in new]
        if any(fusion.kernel == "linear_cross_entropy" for fusion in found):
            heads.append(module.get_submodule("lm_head"))
    for head in heads:
        cls = _origin(type(head)).cls
        exchange(head, _fused_class(_Origin(cls, head_fusions(backends["linear_cross_entropy"]))))
    return fused, [name for name in names if name not in seen]


def _exchange_class(module: nn.Module, cls: type[nn.Module]) -> None:
    module.__class__ = cls


def lines_of(fused: Sequence[Fused]) -> list[str]:
    """What was replaced, one line a kind: "fused 65 x LlamaRMSNorm (rms_norm)"."""
    counts = Counter((one.class_name, one.kernel) for one in fused)
    return [f"fused {count} x {class_name} ({kernel})" for (class_name, kernel), count in counts.items()]


def _checked_names(modules: Literal["auto"] | Sequence[str]) -> tuple[str, ...]:
    if modules == "auto":
        return FUSIONS
    names = [modules] if isinstance(modules, str) else list(modules)
    unknown = [name for name in names if name not in FUSIONS]
    if unknown:
        raise ValueError(
            f'fuse_model: expected modules to be "auto" or a list of {_quoted(FUSIONS)}; found {_quoted(unknown)}'
        )
    return tuple(names)


def _checked_backends(backend: Backend | Mapping[str, Backend], wanted: Sequence[str]) -> dict[str, Backend]:
    """The backend of each fusion that is wanted."""
    by_name = dict(backend) if isinstance(backend, Mapping) else dict.fromkeys(FUSIONS, backend)
    unknown = [name for name in by_name if name not in FUSIONS]
    if unknown:
        raise ValueError(f"fuse_model: expected backends of {_quoted(FUSIONS)}; found {_quoted(unknown)}")
    bad = [value for value in by_name.values() if value not in get_args(Backend)]
    if bad:
        raise ValueError(f'fuse_model: expected backend to be one of {_quoted(get_args(Backend))}, found "{bad[0]}"')
    backends: dict[str, Backend] = {name: by_name.get(name, "auto") for name in wanted}
    if "triton" in backends.values() and not has_triton():
        raise ValueError('fuse_model: backend "triton" needs the package triton, which is not installed; use "auto"')
    return backends


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _origin(cls: type[nn.Module]) -> _Origin:
    origin: _Origin = vars(cls).get(_ORIGIN, _Origin(cls, ()))
    return origin


@cache
def _fused_class(origin: _Origin) -> type[nn.Module]:
    """A subclass that goes by the original's name: Hugging Face writes and compares the names of classes."""

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        reduced = origin.cls.__reduce_ex__(self, max(int(protocol), _PICKLE_PROTOCOL))
        assert isinstance(reduced, tuple) and reduced[0] is copyreg.__newobj__  # type: ignore[attr-defined]
        return _new, (origin,), *reduced[2:]

    members: dict[str, Any] = {
        "__module__": origin.cls.__module__,
        "__qualname__": origin.cls.__qualname__,
        "__doc__": origin.cls.__doc__,
        "__reduce_ex__": reduce,
        _ORIGIN: origin,
    }
    for fusion in origin.fusions:
        members |= members_of(fusion, origin.cls)
    return type(origin.cls.__name__, (origin.cls,), members)


def _new(origin: _Origin) -> nn.Module:
    """An empty module of the fused class: what pickle and deepcopy begin with."""
    cls = _fused_class(origin)
    return cls.__new__(cls)
