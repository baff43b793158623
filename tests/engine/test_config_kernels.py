"""The section `kernels`: what it takes, what has no effect, and what cannot be on this machine."""

import logging
from typing import Any, get_args

import pytest
import torch
from torch import nn

import lowtide
from lowtide.engine.blueprint.optimizer_plan import optimizer_backend
from lowtide.engine.config.config import Config, ConfigError
from lowtide.engine.config.kernels import FUSION_NAMES, KERNEL_NAMES, BackendName, KernelsConfig
from lowtide.engine.model import prepared_model
from lowtide.kernels.dispatch import Backend
from lowtide.kernels.fusions import FUSIONS

OPTIMIZER = {"type": "adamw"}


def load(**kernels: Any) -> Config:
    return Config.load({"kernels": kernels, "optimizer": OPTIMIZER})


def error_of(**kernels: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(**kernels)
    return str(caught.value)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).square().sum()


def lines_of(caplog: pytest.LogCaptureFixture, model: nn.Module, **kernels: Any) -> list[str]:
    caplog.set_level(logging.INFO, "lowtide")
    caplog.clear()
    engine = lowtide.initialize(model, load(**kernels))
    engine.close()
    return [line for line in caplog.messages if "fuse" in line]


def test_its_names_are_those_of_the_kernels() -> None:
    assert FUSION_NAMES == FUSIONS and get_args(BackendName) == get_args(Backend)
    assert set(KernelsConfig.model_fields) == {"backend", "fuse_modules", *KERNEL_NAMES}


def test_a_kernel_without_a_key_of_its_own_follows_the_backend() -> None:
    kernels = load(backend="reference", rms_norm="auto", optimizer_step="triton").kernels
    assert [kernels.backend_of(name) for name in ("rms_norm", "layer_norm", "optimizer_step")] == [
        "auto",
        "reference",
        "triton",
    ]
    default = load().kernels
    assert default.fuse_modules == "auto" and {default.backend_of(name) for name in KERNEL_NAMES} == {"auto"}


@pytest.mark.parametrize("value", [True, False, "auto", [], ["rms_norm", "layer_norm", "rms_norm"]])
def test_what_fuse_modules_takes(value: Any) -> None:
    config = load(fuse_modules=value)
    assert config.kernels.fuse_modules == (tuple(dict.fromkeys(value)) if isinstance(value, list) else value)
    assert Config.load(config.as_dict()).kernels == config.kernels


@pytest.mark.parametrize("value", ["all", 1, None, ["norm"], ["rms_norm", 3], {"rms_norm": True}])
def test_what_fuse_modules_does_not_take(value: Any) -> None:
    names = ", ".join(f'"{name}"' for name in FUSION_NAMES)
    assert f'kernels.fuse_modules: expected "auto", true, false or a list of {names}, found' in error_of(
        fuse_modules=value
    )


def test_unknown_keys_and_backends() -> None:
    assert 'kernels.rmsnorm: unknown key "rmsnorm"; did you mean "rms_norm"?' in error_of(rmsnorm="auto")
    text = error_of(layer_norm="cuda")
    assert 'kernels.layer_norm: expected "auto", "triton" or "reference", found "cuda"' in text


def test_backends_of_modules_that_are_not_fused_are_noted() -> None:
    notes = load(fuse_modules=False, rms_norm="reference", optimizer_step="reference").notes
    assert notes == ('kernels.rms_norm: "reference" has no effect here: kernels.fuse_modules is false',)
    notes = load(fuse_modules=["layer_norm"], rms_norm="auto", layer_norm="auto").notes
    assert notes == ('kernels.rms_norm: "auto" has no effect here: kernels.fuse_modules is ["layer_norm"]',)
    assert load(fuse_modules=True, rms_norm="auto").notes == load(rms_norm="auto").notes == ()


def test_triton_without_a_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    config = Config.load(
        {"device": "cpu", "optimizer": OPTIMIZER, "kernels": {"backend": "triton", "layer_norm": "triton"}}
    )
    with pytest.raises(ConfigError) as caught:
        lowtide.initialize(Model(), config)
    why = '"triton" needs a GPU, and the model is on the device cpu; set "auto", which uses Triton if it can run'
    assert str(caught.value) == f"2 faults:\n  kernels.backend: {why}\n  kernels.layer_norm: {why}"


def test_triton_that_is_not_installed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared_model, "has_triton", lambda: False)
    with pytest.raises(ConfigError, match=r'kernels\.optimizer_step: "triton" needs the package triton, which is not'):
        lowtide.initialize(Model(), load(optimizer_step="triton"))


def test_what_is_fused_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert lines_of(caplog, Model()) == lines_of(caplog, Model(), layer_norm="auto") == []
    said = 'config: kernels.fuse_modules: "auto" is false: the device is cpu'
    assert lines_of(caplog, Model(), fuse_modules="auto") == [said]
    assert lines_of(caplog, Model(), fuse_modules=True) == ["fused 1 x LayerNorm (layer_norm)"]
    assert lines_of(caplog, Model(), fuse_modules=False) == lines_of(caplog, Model(), fuse_modules=[]) == []
    assert lines_of(caplog, Model(), fuse_modules=["layer_norm", "rms_norm"]) == [
        "fused 1 x LayerNorm (layer_norm)",
        "config: kernels.fuse_modules: rms_norm has no effect here: the model has no known module of that kind",
    ]


@pytest.mark.parametrize(
    ("device", "has_triton", "kernels", "expected"),
    [
        ("cpu", True, {}, ("the device is cpu", [])),
        ("cuda", False, {}, ("the package triton is not installed", [])),
        ("cuda", True, {}, ("Triton runs on this device", list(FUSIONS))),
        ("cuda", True, {"backend": "reference"}, ("the backend of all fusions is reference", [])),
        (
            "cuda",
            True,
            {"backend": "reference", "gated_mlp": "triton"},
            ("Triton runs on this device", ["gated_mlp"]),
        ),
    ],
)
def test_auto_fuses_where_triton_runs(
    device: str, has_triton: bool, kernels: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared_model, "has_triton", lambda: has_triton)
    config = load(**kernels).kernels
    backends = {name: config.backend_of(name) for name in FUSION_NAMES}
    assert prepared_model.where_triton_runs(torch.device(device), backends) == expected


def test_states_in_host_memory_are_not_for_triton() -> None:
    values: dict[str, Any] = {"optimizer": OPTIMIZER, "kernels": {"backend": "triton"}}
    assert optimizer_backend(Config.load(values)) == "triton"
    offloaded = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    assert optimizer_backend(Config.load(values | offloaded)) == "auto"
    assert optimizer_backend(Config.load({**values, "kernels": {"optimizer_step": "reference"}})) == "reference"


def test_the_backend_reaches_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("lowtide.zero.fused_update.update_shards", lambda *args, backend, **rest: seen.append(backend))
    engine = lowtide.initialize(Model(), load(optimizer_step="reference"))
    engine.train_step(torch.ones(2, 4))
    engine.close()
    assert seen and set(seen) == {"reference"}
