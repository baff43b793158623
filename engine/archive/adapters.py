"""Adapters of a model: PEFT's, or all trained parameters beside frozen parameters. Also the model with adapters merged.

PEFT's modules are recognised by PEFT's classes. If a model has such a module, the package is imported already.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections import Counter
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
_WRAPPED = "base_model.model."  # PEFT's prefix for the names of the base model


@dataclass(frozen=True)
class AdapterFile:
    """An adapter as a folder has it."""

    folder: str  # within the export; "" for a single adapter, and for PEFT's "default"
    names: Mapping[str, str]  # name in the file -> parameter name in the model; PEFT reads tied modules by each name
    model_files: Mapping[str, Any] = field(default_factory=dict)  # name -> JSON content


def adapter_files(state: NamedState) -> list[AdapterFile]:
    """Return a file for each adapter. Raise ValueError without adapters, and if PEFT computes a file's content."""
    configs = getattr(state.module, "peft_config", None)
    if isinstance(configs, Mapping) and "peft" in sys.modules:
        return [_peft_file(state, name, config) for name, config in configs.items()]
    catalog = state.catalog
    if len(catalog.state_keys) == len(catalog.parameters):
        raise ValueError(
            "engine.export(adapters_only=True): expected a model with adapters (a PEFT model, or trained and frozen "
            "parameters), found no frozen parameter; leave adapters_only out"
        )
    return [AdapterFile("", {name: name for name in catalog.parameters if name in catalog.state_keys})]


def _peft_file(state: NamedState, adapter: str, config: Any) -> AdapterFile:
    peft: Any = sys.modules["peft"]
    module, catalog = state.module, state.catalog
    # PEFT picks tensors out of a state_dict and renames them. It gets stand-ins without memory, whose identity shows
    # the new name of each parameter. A tensor in the result that is no stand-in was computed by PEFT.
    infos: dict[str, TensorInfo] = {**catalog.parameters, **catalog.buffers}
    stand_ins = {name: torch.empty(info.shape, dtype=info.dtype, device="meta") for name, info in infos.items()}
    name_of = {id(value): name for name, value in stand_ins.items()}
    # Names of a tied parameter get the same stand-in, as they are the same tensor in a real state_dict.
    by_name = {name: stand_ins.get(catalog.aliases.get(name, name)) for name in state.whole.names}
    known = {name: value for name, value in by_name.items() if value is not None}
    computed = [f"the embeddings of {config.peft_type.value}"] if config.is_prompt_learning else []
    found: dict[str, Any] = {}
    if not computed:
        with torch._C.DisableTorchFunctionSubclass():  # PEFT calls state_dict() for the names, which would read values
            found = peft.get_peft_model_state_dict(module, state_dict=known, adapter_name=adapter)
        computed = [f"'{name}'" for name, value in found.items() if id(value) not in name_of]
    if computed:
        raise ValueError(
            "engine.export(adapters_only=True): expected an adapter that consists of parameters of the model, found "
            f"{computed[0]}, which PEFT computes; save it from engine.state_dict()"
        )
    prefix = "" if isinstance(module, peft.PeftModel) else _WRAPPED  # add_adapter of transformers wraps nothing
    names = {prefix + name: name_of[id(value)] for name, value in found.items()}
    return AdapterFile("" if adapter == "default" else adapter, names, {_CONFIG: _content_of(config, module)})


def _content_of(config: Any, module: Any) -> Any:
    """Return the JSON that PEFT writes for an adapter's config."""
    config = copy.deepcopy(config)
    # As PEFT's `save_pretrained` does: an adapter that is loaded is frozen unless the user asks for more.
    config.inference_mode = True
    base = module.get_base_model() if hasattr(module, "get_base_model") else module
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(base, "name_or_path", None) or None
    mapping = None
    # Without a task type PEFT needs the class of the base model, to load an adapter by its folder alone.
    if config.task_type is None:
        mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    # Through a file, as only `save_pretrained` makes JSON of it: `to_dict` still has sets.
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder, auto_mapping_dict=mapping)
        return json.loads((Path(folder) / _CONFIG).read_text())


# -- merged -----------------------------------------------------------------------------------------------------------


class MergedModel:
    """A PEFT model with its active adapters merged into the base weights, like `merge_and_unload`."""

    def __init__(self, state: NamedState) -> None:
        """Raises ValueError if adapters are not PEFT's, or cannot be merged layer by layer."""
        module: Any = state.module
        peft: Any = sys.modules.get("peft")
        if peft is None or not isinstance(module, peft.PeftModel):
            raise ValueError(
                "engine.export(merged=True): expected a PEFT model (get_peft_model), found "
                f"{type(module).__name__}, whose kind of adapters is unknown; export it, and merge the files"
            )
        if not hasattr(module.base_model, "merge_and_unload"):  # learned prompts are inputs, not parts of weights
            raise ValueError(
                "engine.export(merged=True): expected adapters in the base model's layers, found "
                f"{module.active_peft_config.peft_type.value}, which PEFT cannot merge; leave merged out"
            )
        from peft.tuners.lora.layer import ParamWrapper
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

        self.module: nn.Module = module.get_base_model()
        self._layers: dict[str, Any] = {}  # by prefix of names
        uses = Counter(id(param) for part in module.modules() for param in part._parameters.values())
        self._kept: dict[str, str] = {}  # prefix of names -> prefix of the names that replace them
        for name, part in module.named_modules():
            if isinstance(part, ModulesToSaveWrapper):
                # PEFT trains a copy of such a module. The copy replaces the original under its name.
                inner = f"modules_to_save.{part.active_adapter}" if part.active_adapters else "original_module"
                self._kept[f"{name}."] = f"{name}.{inner}."
            elif isinstance(part, AuxiliaryTrainingWrapper) or (
                isinstance(part, BaseTunerLayer)
                # A merge of LNTuning swaps modules, where the files take values of the base layer's parameters.
                and (not hasattr(part, "base_layer") or hasattr(part, "ln_tuning_layers"))
            ):
                raise ValueError(
                    f"engine.export(merged=True): expected adapted layers that can be merged, found a "
                    f"{type(part).__name__} at '{name}'; export adapters_only, and merge in a single process"
                )
            elif isinstance(part, BaseTunerLayer):
                if any(uses[id(param)] > 1 for param in part.get_base_layer().parameters(recurse=False)):
                    raise ValueError(
                        "engine.export(merged=True): expected adapted layers without tied weights, found tied weights "
                        f"at '{name}'; a merge would change every module with these weights. Export adapters_only, or "
                        "build the base with tie_word_embeddings=False"
                    )
                # A layer inside an adapted layer is merged with it, except in the chain of `target_parameters`.
                if isinstance(part, ParamWrapper) or not any(outer in self._layers for outer in _modules_of(name)):
                    self._layers[f"{name}."] = part
                self._kept[f"{name}."] = f"{name}.base_layer."
        self.names: dict[str, str] = {}
        """Name in the engine's model -> in the merged model; without the parameters of adapters."""
        catalog = state.catalog
        # Of a tied parameter perhaps only an alias is kept.
        for name in (*catalog.parameters, *catalog.buffers, *catalog.aliases):
            if (new := self._name_of(name)) is not None:
                self.names.setdefault(catalog.aliases.get(name, name), new)

    def _name_of(self, name: str) -> str | None:
        for outer in _modules_of(name):
            inner = self._kept.get(outer, outer)
            if not name.startswith(inner):
                return None
            name = outer + name.removeprefix(inner)
        return name.removeprefix(_WRAPPED) if name.startswith(_WRAPPED) else None

    def layers_of(self, names: Collection[str]) -> list[Any]:
        """Return the adapted layers that have a parameter with any of these names."""
        modules = {module for name in names for module in _modules_of(name)}
        return [layer for prefix, layer in self._layers.items() if prefix in modules]


def _modules_of(name: str) -> list[str]:
    """Return the prefixes of the modules that have a tensor: "a.b." and "a." for "a.b.c"."""
    return [name[: dot + 1] for dot in reversed(range(len(name))) if name[dot] == "."]


@contextmanager
def merged(layers: Sequence[Any]) -> Iterator[None]:
    """Merge the adapters into the layers' full weights, and undo it at the end of the context."""
    done: list[Any] = []
    try:
        for layer in layers:
            layer.merge()
            done.append(layer)
        yield
    finally:
        for layer in done:
            # Subtracting an adapter does not restore the bits of a weight. The weights are private copies, so nothing
            # is lost.
            layer.unmerge()
