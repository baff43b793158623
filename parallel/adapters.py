"""LoRA layers of PEFT around layers that are split: what becomes of their two matrices.

y = x W^T + s (x A^T) B^T, with A (r, in) and B (out, r):

| W      | A                                       | B                                                       |
|--------|-----------------------------------------|---------------------------------------------------------|
| column | whole, computed by all ranks alike      | the same columns; its gradient of x A^T is summed       |
| row    | the same inputs; what it gives is summed | whole, computed by all ranks alike                      |

So a matrix that is whole has the whole gradient on each rank, and one that is split goes with what it is beside.
"""

from __future__ import annotations

from typing import Any

from torch import nn

_BASE = "base_layer"


def is_lora(module: nn.Module) -> bool:
    """Whether it is PEFT's layer around a linear one, of which nothing needs all columns but the product."""
    kind = type(module)
    if kind.__module__ != "peft.tuners.lora.layer" or kind.__name__ != "Linear":
        return False
    magnitudes: Any = getattr(module, "lora_magnitude_vector", ())
    variants: Any = getattr(module, "lora_variant", ())
    return not len(magnitudes) and not len(variants)


def is_other_adapter(module: nn.Module) -> bool:
    """Whether it is PEFT's layer around a linear one, and no such LoRA."""
    is_peft = type(module).__module__.startswith("peft.tuners.") and _BASE in module._modules
    return is_peft and not is_lora(module)


def base_of(module: nn.Module) -> nn.Module:
    """The layer inside of an adapter; else the module."""
    found: Any = getattr(module, _BASE) if is_lora(module) else module
    assert isinstance(found, nn.Module)
    return found


def expanded(styles: dict[str, str], modules: dict[str, nn.Module]) -> dict[str, str]:
    """Names of layers -> styles, with those of the layers in adapters in place of these."""
    found: dict[str, str] = {}
    for name, style in styles.items():
        wrapper = modules[name]
        if not is_lora(wrapper):
            found[name] = style
            continue
        kind = style.partition("/")[0]
        found[f"{name}.{_BASE}"] = style
        inner: Any = {"column": "lora_B", "column_gathered": "lora_B", "row": "lora_A"}.get(kind)
        if inner is not None:
            found |= {f"{name}.{inner}.{key}": style for key in getattr(wrapper, inner)}
    return found


def name_of(name: str, modules: dict[str, nn.Module]) -> str:
    """Of a layer, or of the adapter that it is in."""
    parts = name.split(".")
    for up in (1, 2):
        outer = ".".join(parts[:-up])
        if outer in modules and is_lora(modules[outer]):
            return outer
    return name
