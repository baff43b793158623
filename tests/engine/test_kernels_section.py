"""The section `kernels`: what fuses where, and that fused modules train to the losses of plain ones."""

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
from lowtide.kernels import fuse_model
from lowtide.kernels.dispatch import Backend
from lowtide.kernels.fusions import FUSIONS
from tests.engine.test_hugging_face import MODELS, batch_of, config_of
from tests.kit.models import Chain
from tests.kit.ranks import RankPool
from tests.kit.training import refusal


def load(**kernels: Any) -> Config:
    return Config.load({"kernels": kernels, "optimizer": {"type": "adamw"}, "device": "cpu"})


def normalized() -> nn.Module:
    return Chain(nn.RMSNorm(4))


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
    assert refusal(lowtide.initialize, normalized(), load(backend="triton", rms_norm="triton")) == (
        f"2 faults:\n  kernels.backend: {why}\n  kernels.rms_norm: {why}"
    )
    monkeypatch.setattr(prepared_model, "has_triton", lambda: False)
    text = refusal(lowtide.initialize, normalized(), load(optimizer_step="triton"))
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
    with caplog.at_level(logging.INFO, "lowtide"), lowtide.initialize(normalized(), load(**kernels)):
        assert [line for line in caplog.messages if "fuse" in line] == said


@pytest.mark.parametrize(
    ("device", "has_triton", "kernels", "expected"),
    [
        ("cpu", True, {}, ("the device is cpu", [])),
        ("cuda", False, {}, ("triton is not installed", [])),
        ("cuda", True, {}, ("Triton runs on this device", list(FUSIONS))),
        ("cuda", True, {"backend": "reference"}, ("the backend of all fusions is reference", [])),
        ("cuda", True, {"backend": "reference", "gated_mlp": "triton"}, ("Triton runs on this device", ["gated_mlp"])),
    ],
)
def test_auto_fuses_where_triton_runs(
    device: str, has_triton: bool, kernels: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared_model, "why_not_started", lambda: "" if has_triton else "triton is not installed")
    config = load(**kernels).kernels
    backends = {name: config.backend_of(name) for name in FUSION_NAMES}
    assert prepared_model.where_triton_runs(torch.device(device), backends) == expected


def test_the_backend_reaches_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("lowtide.zero.fused_update.update_shards", lambda *args, backend, **rest: seen.append(backend))
    with lowtide.initialize(normalized(), load(optimizer_step="reference")) as engine:
        engine.train_step(torch.ones(2, 4))
    assert seen and set(seen) == {"reference"}
    offloaded = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}  # states are not for Triton there
    values: dict[str, Any] = {"optimizer": {"type": "adamw"}, "kernels": {"backend": "triton"}}
    assert [optimizer_backend(Config.load(values | more)) for more in ({}, offloaded)] == ["triton", "auto"]


Trained = tuple[list[float], list[bool]]  # losses, and of each forward of the root whether logits were left out


def train(name: str, config: dict[str, Any], fuse: Any = False, loss_fn: Any = None, is_built: bool = False) -> Trained:
    """Two steps, and an evaluation. is_built: `initialize` builds the model."""
    torch.manual_seed(0)
    build = MODELS[name]
    generator = torch.Generator().manual_seed(3)
    batches = [batch_of(name, generator) for _ in range(3)]
    config = config | {"kernels": {"fuse_modules": fuse}}
    with lowtide.initialize(build if is_built else build(), config, loss_fn=loss_fn) as engine:
        left_out: list[bool] = []
        engine.module.register_forward_hook(
            lambda module, args, out: left_out.append(getattr(out, "logits", 0) is None)
        )
        losses = [engine.train_step(batch).loss.item() for batch in batches[:2]]
        losses.append(engine.eval_step(batches[2]).item())
    return losses, left_out


def fused_and_not(name: str, config: dict[str, Any]) -> tuple[Trained, Trained]:
    return train(name, config, True), train(name, config)


def over_a_pipeline() -> tuple[Trained, Trained]:
    config = config_of(0, "auto") | {"parallel": {"pipeline": 2}, "pipeline": {"schedule": "zb-h1", "microbatches": 2}}
    return fused_and_not("llama", config | {"train_micro_batch_size_per_gpu": 1})


def test_stages_0_and_3_train_as_without() -> None:
    at_0, at_3 = config_of(0, "auto"), config_of(3, "auto")
    units = at_3 | {"zero_optimization": {"stage": 3, "units": ["model.layers.?", "lm_head", "model.norm"]}}
    llama = train("llama", at_3)
    for (losses, left_out), (expected, _) in (
        fused_and_not("llama", at_0),
        fused_and_not("gpt2", at_3),
        (train("llama", at_3, True, is_built=True), llama),
        (train("llama", units | {"activation_checkpointing": {"every": 1}}, True), llama),
        (train("llama", at_3, ["linear_cross_entropy", "rms_norm"]), llama),
    ):
        assert losses == pytest.approx(expected, rel=2e-5)
        assert losses[1] != losses[0] and left_out == [True, True, False]


def test_a_pipeline_trains_as_without(ranks: RankPool) -> None:
    by_rank = ranks(2, over_a_pipeline)
    for (losses, _), (expected, _) in by_rank:
        assert losses == pytest.approx(expected, rel=2e-5)
    assert [True] * 4 + [False] in [left_out for (_, left_out), _ in by_rank]  # on the last stage


def cross_entropy_of(output: Any, batch: dict[str, Tensor]) -> Tensor:
    logits, labels = output.logits[:, :-1], batch["labels"][:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_a_loss_function_and_calls_of_the_engine_find_the_logits() -> None:
    config = config_of(0, "auto")
    losses, left_out = train("llama", config, True, cross_entropy_of)
    assert left_out == [False] * 3
    assert losses == pytest.approx(train("llama", config)[0], rel=2e-5)
    with lowtide.initialize(MODELS["llama"](), config | {"kernels": {"fuse_modules": True}}) as engine:
        assert engine(**batch_of("llama", torch.Generator())).logits is not None


def test_close_gives_the_modules_the_classes_back_that_they_came_with() -> None:
    model: Any = MODELS["llama"]()
    fuse_model(model, modules=["gated_mlp"])
    before = [type(module) for module in model.modules()]
    with lowtide.initialize(model, config_of(3, "auto") | {"kernels": {"fuse_modules": True}}):
        assert [type(module) for module in model.modules()] != before
    assert [type(module) for module in model.modules()] == before
