"""What experts compute of the first rows tells whether they can be split."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lowtide.parallel.expert_dispatch import ExpertSelfCheck
from tests.parallel.test_expert_routing import WIDTH, Experts


class Unweighted(Experts):
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return super().forward(hidden_states, top_k_index, torch.ones_like(top_k_weights))


class WeightedBefore(Experts):
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return super().forward(hidden_states * top_k_weights, top_k_index, torch.ones_like(top_k_weights))


class Residual(Experts):
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return hidden_states + super().forward(hidden_states, top_k_index, top_k_weights)


class Centered(Experts):
    """What becomes of a row depends on the others."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return super().forward(hidden_states - hidden_states.mean(0), top_k_index, top_k_weights)


class Dropping(Unweighted):
    """Draws, so that two calls are not alike: it is not tried."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return functional.dropout(super().forward(hidden_states, top_k_index, top_k_weights))


def tried(module: Experts, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(0)
    experts = ExpertSelfCheck("layers.0", module.to(dtype), module.forward)
    rows = torch.randn(7, WIDTH).to(dtype)
    for _ in range(2):
        made = experts(rows, torch.arange(7) % 4)
    return made


@pytest.mark.parametrize("build", [Unweighted, WeightedBefore, Residual, Centered])
def test_experts_that_would_give_other_numbers_are_an_error(build: type[Experts]) -> None:
    with pytest.raises(
        ValueError, match=r"'layers.0': expected an output that depends on its row .*, found it off by \d+%"
    ):
        tried(build())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("build", [Experts, Dropping])
def test_others_are_taken(build: type[Experts], dtype: torch.dtype) -> None:
    assert tried(build(), dtype).shape == (7, WIDTH)


class Paired(Experts):
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        return super().forward(hidden_states, top_k_index, top_k_weights), top_k_index


def test_an_output_that_is_no_tensor_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"of the shape of its input, \(7, 3\), found a tuple"):
        tried(Paired())
