"""LoRA of PEFT, with values in both of its matrices."""

import warnings
from collections.abc import Callable
from typing import Any

import peft
import torch
from torch import nn

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(build: Callable[[], nn.Module], layers: list[str], **more: Any) -> nn.Module:
    """At the start one matrix is zero, and the other has no gradient: here both have values."""
    model = build()
    torch.manual_seed(1)
    config: Any = peft.LoraConfig(r=3, target_modules=layers, **more)
    with warnings.catch_warnings():  # peft's own
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        made: Any = peft.get_peft_model(model, config)
    for name, param in made.named_parameters():
        if "lora_" in name:
            param.data = torch.randn(param.shape, dtype=torch.float64) / 4
    return made
