"""The section `kernels`: what fuses where, and what cannot be on this machine."""

import logging
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.engine.blueprint.optimizer_plan import optimizer_backend
from lowtide.engine.config.config import Config
from lowtide.engine.config.kernels import FUSION_NAMES, KERNEL_NAMES, BackendName, KernelsConfig
from lowtide.engine.model import prepared_model
from lowtide.kernels.dispatch import Backend
from lowtide.kernels.fusions import FUSIONS
from tests.kit.training import refusal


def load(**kernels: Any) -> Config:
    return Config.load({"kernels": kernels, "optimizer": {"type": "adamw"}, "device": "cpu"})


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).square().sum()


def test_its_names_are_those_of_the_kernels() -> None:
    assert FUSION_NAMES == FUSIONS and get_args(BackendName) == get_args(Backend)
    assert set(KernelsConfig.model_fields) == {"backend", "fuse_modules", *KERNEL_NAMES}


def test_a_kernel_without_a_key_of_its_own_follows_the_backend() -> None:
    kernels = load(backend="reference", rms_norm="auto", optimizer_step="triton").kernels
    found = [kernels.backend_of(name) for name in ("rms_norm", "gated_mlp", "optimizer_step")]
    assert found == ["auto", "reference", "triton"]
    assert {load().kernels.backend_of(name) for name in KERNEL_NAMES} == {"auto"}


def test_triton_that_cannot_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    why = '"triton" needs a GPU, and the model is on the device cpu; set "auto", which uses Triton if it can run'
    assert refusal(lowtide.initialize, Model(), load(backend="triton", rms_norm="triton")) == (
        f"2 faults:\n  kernels.backend: {why}\n  kernels.rms_norm: {why}"
    )
    monkeypatch.setattr(prepared_model, "has_triton", lambda: False)
    text = refusal(lowtide.initialize, Model(), load(optimizer_step="triton"))
    assert 'kernels.optimizer_step: "triton" needs the package triton, which is not' in text


@pytest.mark.parametrize(
    ("kernels", "said"),
    [
        ({}, []),
        ({"rms_norm": "auto"}, []),
        ({"fuse_modules": "auto"}, ['config: kernels.fuse_modules: "auto" is false: the device is cpu']),
        ({"fuse_modules": True}, ["fused 1 x RMSNorm (rms_norm)"]),
        ({"fuse_modules": False}, []),
        ({"fuse_modules": []}, []),
        (
            {"fuse_modules": ["rms_norm", "gated_mlp"]},
            [
                "fused 1 x RMSNorm (rms_norm)",
                "config: kernels.fuse_modules: gated_mlp has no effect here: the model has no known module of that "
                "kind",
            ],
        ),
    ],
)
def test_what_is_fused_is_logged(caplog: pytest.LogCaptureFixture, kernels: dict[str, Any], said: list[str]) -> None:
    with caplog.at_level(logging.INFO, "lowtide"), lowtide.initialize(Model(), load(**kernels)):
        assert [line for line in caplog.messages if "fuse" in line] == said


@pytest.mark.parametrize(
    ("device", "has_triton", "kernels", "expected"),
    [
        ("cpu", True, {}, ("the device is cpu", [])),
        ("cuda", False, {}, ("the package triton is not installed", [])),
        ("cuda", True, {}, ("Triton runs on this device", list(FUSIONS))),
        ("cuda", True, {"backend": "reference"}, ("the backend of all fusions is reference", [])),
        ("cuda", True, {"backend": "reference", "gated_mlp": "triton"}, ("Triton runs on this device", ["gated_mlp"])),
    ],
)
def test_auto_fuses_where_triton_runs(
    device: str, has_triton: bool, kernels: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared_model, "has_triton", lambda: has_triton)
    config = load(**kernels).kernels
    backends = {name: config.backend_of(name) for name in FUSION_NAMES}
    assert prepared_model.where_triton_runs(torch.device(device), backends) == expected


def test_the_backend_reaches_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("lowtide.zero.fused_update.update_shards", lambda *args, backend, **rest: seen.append(backend))
    with lowtide.initialize(Model(), load(optimizer_step="reference")) as engine:
        engine.train_step(torch.ones(2, 4))
    assert seen and set(seen) == {"reference"}
    offloaded = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}  # states are not for Triton there
    values: dict[str, Any] = {"optimizer": {"type": "adamw"}, "kernels": {"backend": "triton"}}
    assert [optimizer_backend(Config.load(values | more)) for more in ({}, offloaded)] == ["triton", "auto"]
