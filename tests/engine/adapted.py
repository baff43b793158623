"""A model of PEFT and one with adapters written by hand; the functions run on ranks."""

import os
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.engine.plain_weights import Adapted
from tests.kit import models
from tests.kit.training import settings

os.environ["HF_HUB_OFFLINE"] = "1"
NUM_TOKENS = 61
ROWS = 8  # of a global batch
RATES: dict[str, Any] = {"lr": 1.0, "momentum": 0.9}
"""Of SGD. AdamW would make a full step of a gradient that is rounding noise, so two sums could not be compared."""


def base(dtype: torch.dtype = torch.float32) -> Any:
    from tests.kernels.fused_models import llama  # without transformers, a test that asks for it is skipped

    return llama(dtype=dtype).to(dtype)


def lora(model: nn.Module | None = None, **options: Any) -> Any:
    """With adapters that are not zero, as PEFT puts them on. options: of LoraConfig."""
    peft = pytest.importorskip("peft")
    options = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False} | options
    return with_peft(base() if model is None else model, peft.LoraConfig(task_type="CAUSAL_LM", **options))


def with_peft(model: nn.Module, config: Any) -> Any:
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`|Unsupported layer type", UserWarning)
        return peft.get_peft_model(model, config)


def half_base() -> Any:
    """A base in bf16; PEFT keeps its adapters in fp32."""
    return lora(base(torch.bfloat16))


class ByHand(models.TinyGPT):
    """Low-rank additions to frozen layers, and nothing else that is trained."""

    def __init__(self) -> None:
        super().__init__(width=22, layers=2)
        self.requires_grad_(False)
        for block in self.blocks:
            block.qkv = Adapted(22, 66)


def tokens(step: int) -> Tensor:
    return torch.randint(NUM_TOKENS, (ROWS, 7), generator=torch.Generator().manual_seed(step))


def engine_of(build: Any, stage: int, **config: Any) -> Any:
    """accumulation: of the config."""
    torch.manual_seed(0)
    batch: dict[str, Any] = {"train_micro_batch_size_per_gpu": None, "train_batch_size": ROWS}
    batch["gradient_accumulation_steps"] = config.pop("accumulation", 1)
    optimizer = {"type": "sgd", "params": RATES}
    return lowtide.initialize(build, settings(stage, optimizer=optimizer, gradient_clipping=0.5, **batch, **config))


def run(engine: Any, first: int, count: int) -> list[float]:
    """The losses of so many steps."""
    losses = []
    for step in range(first, first + count):
        ids = tokens(step).chunk(engine.data_size)[engine.data_rank]
        batch: Any = {"input_ids": ids, "labels": ids}
        if not engine.config.has_stages and isinstance(engine.module, ByHand):
            batch = ids, ids
        losses.append(engine.train_step(batch).loss.item())
    return losses


def train_plainly(build: Any, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """By plain torch, in this process."""
    torch.manual_seed(0)
    model = build()
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, **RATES)
    losses = []
    for step in range(steps):
        loss = model(input_ids=tokens(step), labels=tokens(step)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


Run = tuple[Any, int, dict[str, Any]]
"""(what builds the model, stage, config)"""


def train_all(runs: Sequence[Run], steps: int) -> list[tuple[list[float], dict[str, Tensor]]]:
    found = []
    for build, stage, config in runs:
        with engine_of(build, stage, **config) as engine:
            found.append((run(engine, 0, steps), engine.state_dict()))
    return found
