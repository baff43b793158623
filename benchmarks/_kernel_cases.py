"""All cases, by name."""

from __future__ import annotations

from collections.abc import Mapping

from _kernel_case import Case
from _kernel_flat import FLAT_CASES
from _kernel_layers import LAYER_CASES
from _kernel_losses import LOSS_CASES

CASES: Mapping[str, Case] = {case.name: case for case in (*LAYER_CASES, *LOSS_CASES, *FLAT_CASES)}
CONTENDERS = ("lowtide", "torch", "compile", "liger")
