"""A fused model computes the loss and the gradients of the model that it was made from."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.kernels.dispatch import Backend
from lowtide.kernels.fuse import fuse_model
from lowtide.kernels.fused_loss import loss_only
from tests.kernels.fused_models import CAUSAL_LMS, Classifier, llama, mixtral, token_batch
from tests.kit.models import recomputing

FLOAT32_STEPS = 2.0**-23 * 256  # roundings of float32 in two layers, relative to the largest value of a tensor
FLOAT64_STEPS = 2.0**-52 * 4096

KERNELS = {
    "llama": {"rms_norm": 5, "gated_mlp": 2, "rotary_embedding": 2, "cross_entropy": 1, "linear_cross_entropy": 1},
    "qwen3": {"rms_norm": 9, "gated_mlp": 2, "rotary_embedding": 2, "cross_entropy": 1, "linear_cross_entropy": 1},
    "gemma2": {"rms_norm": 9, "gated_mlp": 2, "rotary_embedding": 2, "cross_entropy": 1, "linear_cross_entropy": 1},
    "gpt2": {"cross_entropy": 1, "linear_cross_entropy": 1},
}


def pair(model: nn.Module, backend: Backend = "reference", seed: int = 0) -> tuple[Any, Any]:
    """The model and a fused copy, norms moved from where they start: weights of 1, or 0, hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if "Norm" in type(module).__name__:
                for param in module.parameters():
                    param.add_(0.3 * torch.randn(param.shape, generator=generator).to(param.dtype))
    fused = copy.deepcopy(model)
    assert fuse_model(fused, backend=backend)
    return model, fused


def assert_near(found: Tensor, wanted: Tensor, steps: float, name: str = "") -> None:
    error, size = (found.double() - wanted.double()).abs().max().item(), wanted.double().abs().max().item()
    assert error <= steps * size, (name, error, size)


def assert_same_gradients(fused: nn.Module, plain: nn.Module, steps: float) -> None:
    for (name, found), wanted in zip(fused.named_parameters(), plain.parameters(), strict=True):
        assert found.grad is not None and wanted.grad is not None, name
        assert_near(found.grad, wanted.grad, steps, name)


@pytest.mark.parametrize("name", CAUSAL_LMS)
def test_a_language_model_keeps_its_loss_and_gradients(name: str, generator: torch.Generator) -> None:
    """With logits, and without; GPT-2's head is tied."""
    plain, fused = pair(CAUSAL_LMS[name](), seed=generator.initial_seed())
    batch = token_batch(generator)
    expected, found = plain(**batch), fused(**batch)
    assert_near(found.logits, expected.logits, FLOAT32_STEPS)
    expected.loss.backward()
    with loss_only():
        short = fused(**batch)
    assert short.logits is None
    for loss in (found.loss, short.loss):
        fused.zero_grad()
        assert_near(loss, expected.loss, FLOAT32_STEPS)
        loss.backward()
        assert_same_gradients(fused, plain, FLOAT32_STEPS)


def test_the_experts_of_mixtral_keep_their_own_code(generator: torch.Generator) -> None:
    plain, fused = pair(mixtral(), seed=generator.initial_seed())
    assert {one.kernel for one in fuse_model(copy.deepcopy(plain))} == {"rms_norm", "rotary_embedding"}
    batch = token_batch(generator)
    assert_near(fused(**batch).loss, plain(**batch).loss, FLOAT32_STEPS)


@pytest.mark.parametrize("name", KERNELS)
def test_all_that_is_known_is_replaced(name: str) -> None:
    counts: dict[str, int] = {}
    for one in fuse_model(CAUSAL_LMS[name](), backend="reference"):
        counts[one.kernel] = counts.get(one.kernel, 0) + 1
    assert counts == KERNELS[name]


@pytest.mark.parametrize(
    ("name", "fusion", "kernel"),
    [
        ("llama", "rms_norm", "rms_norm"),
        ("llama", "gated_mlp", "swiglu"),
        ("gemma", "gated_mlp", "geglu"),
        ("llama", "rotary_embedding", "rotary_embedding"),
        ("gpt2", "cross_entropy", "cross_entropy"),
        ("gpt2", "linear_cross_entropy", "linear_cross_entropy"),
    ],
)
def test_the_kernel_is_what_computes(name: str, fusion: str, kernel: str, generator: torch.Generator) -> None:
    """It alone refuses float64 on Triton."""
    model = CAUSAL_LMS[name]().double()
    fuse_model(model, modules=[fusion], backend="triton")
    with pytest.raises(ValueError, match=rf'^{kernel}: backend "triton" takes float32'):
        model(**token_batch(generator))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("dtype", "steps"), [(torch.float64, FLOAT64_STEPS), (torch.float32, FLOAT32_STEPS)])
def test_modules_of_torch_keep_their_loss_and_gradients(
    dtype: torch.dtype, steps: float, affine: bool, generator: torch.Generator
) -> None:
    torch.manual_seed(generator.initial_seed())
    plain, fused = pair(Classifier(affine).to(dtype), seed=generator.initial_seed())
    assert {type(fused.norm), type(fused.loss)}.isdisjoint({nn.RMSNorm, nn.CrossEntropyLoss})
    x = torch.randn(6, 5, generator=generator).to(dtype)
    labels = torch.tensor([0, 3, 1, 2, 3, 0])
    expected, found = plain(x, labels), fused(x, labels)
    assert found.dtype == expected.dtype
    assert_near(found, expected, steps)
    expected.backward()
    found.backward()
    assert_same_gradients(fused, plain, steps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtypes_are_those_of_the_model(dtype: torch.dtype, generator: torch.Generator) -> None:
    plain, fused = pair(CAUSAL_LMS["gemma2"]().to(dtype), seed=generator.initial_seed())
    batch = token_batch(generator)
    found, expected = fused(**batch), plain(**batch)
    assert (found.loss.dtype, found.logits.dtype) == (expected.loss.dtype, expected.logits.dtype)
    # Values of at most a few, rounded some 20 times a layer.
    assert_near(found.loss, expected.loss, 40 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_norm_of_torch_keeps_its_dtype_and_eps(dtype: torch.dtype, generator: torch.Generator) -> None:
    norm = nn.RMSNorm(12).to(dtype)  # its eps is None: torch's own choice
    x = (1e-3 * torch.randn(3, 12, generator=generator)).to(dtype)  # so small that eps matters
    expected = norm(x)
    fuse_model(norm, backend="reference")
    assert norm(x).dtype == expected.dtype
    assert_near(norm(x), expected, 4 * torch.finfo(dtype).eps)


def test_a_float32_weight_widens_what_it_scales_as_before(generator: torch.Generator) -> None:
    model: Any = llama()
    norm, x = model.model.norm, torch.randn(3, 32, generator=generator).bfloat16()
    expected = norm(x)
    fuse_model(model, backend="reference")
    assert expected.dtype == norm(x).dtype == torch.float32
    assert_near(norm(x), expected, 2 * torch.finfo(torch.bfloat16).eps)


def test_frozen_norms_and_recomputed_layers(generator: torch.Generator) -> None:
    plain, fused = pair(llama(), seed=generator.initial_seed())
    for model in (plain, fused):
        model.model.norm.requires_grad_(False)
        model.model.layers[0].mlp.requires_grad_(False)
        recomputing(model, use_reentrant=False)
    batch = token_batch(generator)
    expected, found = plain(**batch).loss, fused(**batch).loss
    expected.backward()
    found.backward()
    assert_near(found, expected, FLOAT32_STEPS)
    for (name, wanted), param in zip(plain.named_parameters(), fused.parameters(), strict=True):
        assert (param.grad is None) == (not wanted.requires_grad), name
        if wanted.grad is not None:
            assert_near(param.grad, wanted.grad, FLOAT32_STEPS, name)
