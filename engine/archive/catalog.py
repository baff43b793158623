"""What the whole model has, by name, whichever ranks hold it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ...checkpoint.fragment import TensorInfo
from ...zero.parameter_states import StateKey


@dataclass(frozen=True)
class Catalog:
    """The same on every rank. Tied parameters go by their first name."""

    parameters: Mapping[str, TensorInfo]  # the shape, and the dtype of the most precise copy
    compute_dtypes: Mapping[str, torch.dtype]  # of the parameters
    buffers: Mapping[str, TensorInfo]  # persistent ones
    aliases: Mapping[str, str]  # further names of tied parameters -> the first name
    state_keys: Mapping[str, StateKey]  # trained parameters -> the key under which their states are described

    @classmethod
    def merged(cls, parts: Sequence[Catalog]) -> Catalog:
        """Of the stages of a pipeline, in their order."""
        return cls(
            {name: info for part in parts for name, info in part.parameters.items()},
            {name: dtype for part in parts for name, dtype in part.compute_dtypes.items()},
            {name: info for part in parts for name, info in part.buffers.items()},
            {name: first for part in parts for name, first in part.aliases.items()},
            {name: key for part in parts for name, key in part.state_keys.items()},
        )
