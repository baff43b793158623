"""What of a model are adapters: PEFT's, or whatever is trained beside frozen parameters; and what they come to, merged.

Modules of PEFT are known by its own classes; where one stands in a model, the package is imported already.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...checkpoint.chunk_view import TensorInfo
from .named_state import NamedState

FILE = "adapter_model.safetensors"
_CONFIG = "adapter_config.json"
_WRAPPED = "base_model.model."  # what PEFT puts before the names of what it wraps


@dataclass(frozen=True)
class AdapterFile:
    """One adapter, as a folder of its own has it."""

    folder: str  # in that of the export; "" for the only one, or the one that PEFT calls "default"
    names: Mapping[str, str]  # of parameters in the model -> in the file
    model_files: Mapping[str, Any] = field(default_factory=dict)  # name -> JSON content


def adapter_files(module: nn.Module, state: NamedState) -> list[AdapterFile]:
    """A file for each adapter. Raises ValueError where there are none, or one whose file PEFT computes."""
    configs = getattr(module, "peft_config", None)
    if isinstance(configs, Mapping) and "peft" in sys.modules:
        return [_peft_file(module, state, name, config) for name, config in configs.items()]
    catalog = state.catalog
    if len(catalog.state_keys) == len(catalog.parameters):
        raise ValueError(
            "engine.export(adapters_only=True): expected a model with adapters (one of PEFT, or frozen parameters "
            "beside trained ones), found no frozen parameter; leave adapters_only out"
        )
    return [AdapterFile("", {name: name for name in catalog.parameters if name in catalog.state_keys})]


def _peft_file(module: nn.Module, state: NamedState, adapter: str, config: Any) -> AdapterFile:
    peft: Any = sys.modules["peft"]
    catalog = state.catalog
    infos: dict[str, TensorInfo] = {**catalog.parameters, **catalog.buffers}
    stand_ins = {name: torch.empty(info.shape, dtype=info.dtype, device="meta") for name, info in infos.items()}
    name_of = {id(value): name for name, value in stand_ins.items()}
    by_name = {name: stand_ins.get(catalog.aliases.get(name, name)) for name in state.whole.names}
    known = {name: value for name, value in by_name.items() if value is not None}
    computed = [f"the embeddings of {config.peft_type.value}"] if config.is_prompt_learning else []
    found: dict[str, Any] = {}
    if not computed:
        with torch._C.DisableTorchFunctionSubclass():  # it asks modules for their names by state_dict(), values and all
            found = peft.get_peft_model_state_dict(module, state_dict=known, adapter_name=adapter)
        computed = [f"'{name}'" for name, value in found.items() if id(value) not in name_of]
    if computed:
        raise ValueError(
            "engine.export(adapters_only=True): expected an adapter whose file has parameters of the model, found "
            f"{computed[0]}, which PEFT computes; take engine.state_dict(), and save from that"
        )
    prefix = "" if isinstance(module, peft.PeftModel) else _WRAPPED  # transformers' own add_adapter wraps nothing
    names = {name_of[id(value)]: prefix + name for name, value in found.items()}
    return AdapterFile("" if adapter == "default" else adapter, names, {_CONFIG: _content_of(config, module)})


def _content_of(config: Any, module: Any) -> Any:
    """What PEFT writes of an adapter's config."""
    config = copy.deepcopy(config)
    config.inference_mode = True
    base = module.get_base_model() if hasattr(module, "get_base_model") else module
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(base, "name_or_path", None) or None
    mapping = None
    if config.task_type is None:
        mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder, auto_mapping_dict=mapping)
        return json.loads((Path(folder) / _CONFIG).read_text())


# -- merged -----------------------------------------------------------------------------------------------------------


class MergedModel:
    """A model of PEFT with its active adapters in the weights that they were put on, as `merge_and_unload` gives it."""

    def __init__(self, module: nn.Module, state: NamedState) -> None:
        """Raises ValueError for adapters that are not PEFT's, or not to be merged one by one."""
        peft: Any = sys.modules.get("peft")
        if peft is None or not isinstance(module, peft.PeftModel):
            raise ValueError(
                "engine.export(merged=True): expected a model of PEFT (get_peft_model), found "
                f"{type(module).__name__}: how its adapters are added is not known; export it, and merge what was "
                "written"
            )
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

        self.module: nn.Module = module.get_base_model()
        self._layers: list[tuple[str, Any]] = []
        kept: dict[str, str] = {}  # prefix of names -> of those among them that take their place
        for name, part in module.named_modules():
            if isinstance(part, ModulesToSaveWrapper):
                inner = f"modules_to_save.{part.active_adapter}" if part.active_adapters else "original_module"
                kept[f"{name}."] = f"{name}.{inner}."
            elif isinstance(part, AuxiliaryTrainingWrapper) or (
                isinstance(part, BaseTunerLayer) and not hasattr(part, "base_layer")
            ):
                raise ValueError(
                    f"engine.export(merged=True): expected layers that merge one by one, found a {type(part).__name__} "
                    f"at '{name}'; export adapters_only, and merge that in one process"
                )
            elif isinstance(part, BaseTunerLayer):
                if not any(name.startswith(outer) for outer, _ in self._layers):  # else it is merged with that
                    self._layers.append((f"{name}.", part))
                kept[f"{name}."] = f"{name}.base_layer."
        self._kept = sorted(kept.items(), key=lambda item: -len(item[0]))  # what is inside before what is around it
        names = [*state.catalog.parameters, *state.catalog.buffers]
        self.names = {name: new for name in names if (new := self._name_of(name)) is not None}
        """In the engine's model -> in the merged one, without those of adapters."""

    def _name_of(self, name: str) -> str | None:
        for outer, inner in self._kept:
            if name.startswith(inner):
                name = outer + name.removeprefix(inner)
            elif name.startswith(outer):
                return None
        return name.removeprefix(_WRAPPED)

    def layers_of(self, names: Collection[str]) -> list[Any]:
        """Those that a parameter of these names is of."""
        return [layer for prefix, layer in self._layers if any(name.startswith(prefix) for name in names)]


@contextmanager
def merged(layers: Sequence[Any]) -> Iterator[None]:
    """Meanwhile the layers' weights, which are full, are those with their adapters in them."""
    done: list[Any] = []
    try:
        for layer in layers:
            layer.merge()
            done.append(layer)
        yield
    finally:
        for layer in done:
            layer.unmerge()
