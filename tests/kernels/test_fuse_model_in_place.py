"""A fused model is the same model: names, classes, copies; and only that model is changed."""

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.kernels import fuse
from lowtide.kernels.fuse import Fused, fuse_model
from lowtide.kernels.fusions import FUSIONS
from tests.kernels.fused_models import Classifier, llama, token_batch
from tests.kit.hugging_face import GROUPED, transformers
from tests.kit.training import refusal


def classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def test_what_was_replaced_is_returned() -> None:
    model = nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 3))
    model.add_module("loss", nn.CrossEntropyLoss())
    assert fuse_model(model) == [
        Fused("0", "RMSNorm", "rms_norm"),
        Fused("loss", "CrossEntropyLoss", "cross_entropy"),
    ]


def test_names_classes_and_parameters_stay() -> None:
    plain = llama()
    fused = copy.deepcopy(plain)
    params = list(fused.parameters())
    fuse_model(fused)
    assert all(one is other for one, other in zip(params, fused.parameters(), strict=True))
    assert list(fused.state_dict()) == list(plain.state_dict())
    assert str(fused) == str(plain)
    for module, original in zip(fused.modules(), plain.modules(), strict=True):
        assert isinstance(module, type(original)) and str(type(module)) == str(type(original))
        assert vars(module).keys() == vars(original).keys()
    plain.load_state_dict(fused.state_dict())


def test_another_model_of_the_class_is_untouched(generator: torch.Generator) -> None:
    plain = llama()
    before, batch = classes(plain), token_batch(generator)
    loss = plain(**batch).loss
    rotate = transformers.models.llama.modeling_llama.apply_rotary_pos_emb
    fuse_model(llama(), backend="reference")
    assert classes(plain) == before == classes(llama())
    assert torch.equal(plain(**batch).loss, loss)
    assert transformers.models.llama.modeling_llama.apply_rotary_pos_emb is rotate


def test_a_second_call_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = llama()
    assert fuse_model(model)
    before = classes(model)
    caplog.set_level(logging.INFO, "lowtide")
    assert fuse_model(model) == [] and caplog.messages == []
    assert classes(model) == before


def test_another_backend_takes_the_place_of_the_first(generator: torch.Generator) -> None:
    norm = nn.RMSNorm(4)
    x = torch.randn(2, 4, generator=generator).double()
    fuse_model(norm.double(), backend="triton")
    assert 'rms_norm: backend "triton" takes float32, bfloat16, float16' in refusal(norm, x)
    assert fuse_model(norm, backend={"rms_norm": "reference"}) == [Fused("", "RMSNorm", "rms_norm")]
    assert norm(x).dtype == torch.float64
    assert type(norm).__mro__[1] is nn.RMSNorm


def test_fusions_come_one_by_one_in_any_order() -> None:
    one, other = llama(), llama()
    for name in ("linear_cross_entropy", "rms_norm", "cross_entropy"):
        fuse_model(one, modules=[name])
    fuse_model(other, modules=["cross_entropy", "linear_cross_entropy", "rms_norm"])
    assert classes(one) == classes(other)
    assert {one.kernel for one in fuse_model(one)} == {"linear_cross_entropy", "gated_mlp", "rotary_embedding"}


@pytest.mark.parametrize("protocol", [0, pickle.HIGHEST_PROTOCOL])
def test_pickle_keeps_the_fusion(protocol: int, generator: torch.Generator) -> None:
    torch.manual_seed(generator.initial_seed())
    model = Classifier()
    fuse_model(model, backend="reference")
    again = pickle.loads(pickle.dumps(model, protocol))
    assert classes(again) == classes(model)
    x, labels = torch.randn(3, 5, generator=generator), torch.tensor([0, 1, 2])
    assert torch.equal(again(x, labels), model(x, labels))


def test_a_saved_model_names_the_class_of_hugging_face(tmp_path: Any) -> None:
    model: Any = llama()
    fuse_model(model)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is transformers.LlamaForCausalLM
    assert again.config.architectures == ["LlamaForCausalLM"]
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), model.state_dict().values(), strict=True))


def test_a_model_without_memory_is_fused_too() -> None:
    with torch.device("meta"):
        model = llama()
    assert len(fuse_model(model)) == 11
    assert all(param.is_meta for param in model.parameters())


def test_an_override_of_forward_comes_and_goes(generator: torch.Generator) -> None:
    """As Hugging Face does around a forward."""
    model: Any = llama()
    fuse_model(model, backend="reference")
    norm = model.model.norm
    x = torch.randn(2, 32, generator=generator)
    norm.forward = lambda x: 7
    assert norm(x) == 7
    del norm.forward
    assert norm(x).shape == x.shape
    output = model(**token_batch(generator), output_hidden_states=True)
    assert len(output.hidden_states) == 3


class OwnNorm(nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class LlamaRMSNorm(nn.Module):
    """Of the name alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(4)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def llama_mlp(activation: str) -> nn.Module:
    config = transformers.LlamaConfig(**GROUPED, hidden_act=activation)
    mlp: nn.Module = transformers.models.llama.modeling_llama.LlamaMLP(config)
    return mlp


def having(module: nn.Module, name: str, value: Any) -> nn.Module:
    setattr(module, name, value)
    return module


@pytest.mark.parametrize(
    "module",
    [
        OwnNorm(4),
        LlamaRMSNorm(),
        nn.LayerNorm(4),
        nn.RMSNorm([3, 4]),
        nn.BatchNorm1d(4),
        having(nn.RMSNorm(4), "forward", lambda x: x),
        llama_mlp("relu"),
        llama_mlp("quick_gelu"),
        having(llama_mlp("silu"), "dropout", nn.Dropout()),
        having(transformers.models.llama.modeling_llama.LlamaRMSNorm(4), "bias", nn.Parameter(torch.zeros(4))),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_only_looks_alike_is_left_alone(module: nn.Module) -> None:
    before = type(module)
    assert fuse_model(module) == [] and type(module) is before


@pytest.mark.parametrize("activation", ["silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh"])
def test_an_mlp_follows_its_activation(activation: str, generator: torch.Generator) -> None:
    mlp = llama_mlp(activation)
    x = 3 * torch.randn(4, 32, generator=generator)
    expected = mlp(x).detach()
    assert len(fuse_model(mlp, backend="reference")) == 1
    torch.testing.assert_close(mlp(x), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("affine", [True, False])
def test_an_input_of_another_width_is_an_error(affine: bool) -> None:
    norm = nn.RMSNorm(4, elementwise_affine=affine)
    fuse_model(norm)
    assert "Norm: expected an input whose last dimension is 4, found (2, 5)" in refusal(norm, torch.ones(2, 5))


def test_names_that_are_unknown_or_not_installed_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "has_triton", lambda: False)
    model, known = llama(), ", ".join(f'"{name}"' for name in FUSIONS)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"modules": ["norm", "rms_norm"]}, f'expected modules "auto" or a list of {known}; found "norm"'),
        ({"backend": {"norm": "reference"}}, f'expected backends of {known}; found "norm"'),
        ({"backend": "cuda"}, 'expected a backend of "auto", "triton", "reference", found "cuda"'),
        ({"backend": "triton"}, 'backend "triton" needs the package triton; install it, or use "auto"'),
    ]
    for given, text in wrong:
        assert f"fuse_model: {text}" in refusal(fuse_model, model, **given)


def test_a_name_that_finds_nothing_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    fuse_model(nn.Sequential(nn.RMSNorm(4)), modules=["rms_norm", "gated_mlp"])
    fuse_model(nn.Sequential(nn.RMSNorm(4)))
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "fuse_model: gated_mlp has no effect here: the model has no known module of that kind"
    ]
