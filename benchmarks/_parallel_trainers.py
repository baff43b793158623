"""How each contender of `parallel.py` splits a Llama over ranks: a builder a kind, from the model to a `Trainer`.

Every peer is set up as its own documentation has it. The optimizer is AdamW for all, of torch's fused implementation.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@dataclass(frozen=True)
class Trainer:
    """`step(tokens)`, (rows, tokens), trains one step and gives the loss of the whole batch."""

    step: Callable[[Tensor], float]
    close: Callable[[], None]


def _single(model: nn.Module, size: dict[str, int]) -> Trainer:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(tokens: Tensor) -> float:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return Trainer(step, lambda: None)


def _dtensor(model: nn.Module, size: dict[str, int], sequence: bool) -> Trainer:
    """torch's own tensor parallelism; sequence: norms on parts of the tokens. The loss over parts of the logits."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    part = Shard(1) if sequence else Replicate()
    columns = ColwiseParallel()
    rows = RowwiseParallel(output_layouts=part)
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=part),
        "lm_head": ColwiseParallel(input_layouts=part, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence:
        plan["model.norm"] = SequenceParallel()
    for number in range(size["layers"]):
        layer = f"model.layers.{number}"
        plan |= {f"{layer}.self_attn.{name}_proj": columns for name in "qkv"} | {f"{layer}.self_attn.o_proj": rows}
        plan |= {f"{layer}.mlp.gate_proj": columns, f"{layer}.mlp.up_proj": columns, f"{layer}.mlp.down_proj": rows}
        if sequence:
            plan |= {
                f"{layer}.input_layernorm": SequenceParallel(),
                f"{layer}.post_attention_layernorm": SequenceParallel(),
            }
            whole = (Replicate(),)
            plan[f"{layer}.self_attn"] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": part}, desired_input_kwarg_layouts={"hidden_states": whole[0]}
            )
            plan[f"{layer}.mlp"] = PrepareModuleInput(input_layouts=(part,), desired_input_layouts=whole)
    parallelize_module(model, mesh, plan)
    split = [param for param in model.parameters() if isinstance(param, DTensor)]
    others = [param for param in model.parameters() if not isinstance(param, DTensor)]
    optimizers = [torch.optim.AdamW(some, fused=True, **ADAMW) for some in (split, others) if some]

    positions = torch.arange(size["tokens"])[None]

    def step(tokens: Tensor) -> float:
        with loss_parallel():
            logits = model(input_ids=tokens, position_ids=positions).logits
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]  # as torch has it for what may be a DTensor
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        value = loss.full_tensor() if isinstance(loss, DTensor) else loss
        return float(value.detach())

    return Trainer(step, dist.barrier)


def _autotp(model: nn.Module, size: dict[str, int]) -> Trainer:
    """DeepSpeed's training with AutoTP."""
    deepspeed = importlib.import_module("deepspeed")
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    config = {
        "train_micro_batch_size_per_gpu": size["rows"],
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},
        "zero_optimization": {"stage": 0},
        "tensor_parallel": {"autotp_size": ranks},
        "steps_per_print": 1 << 30,
    }
    model = deepspeed.tp_model_init(model, tp_size=ranks, dtype=torch.float32)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return Trainer(
        lambda tokens: _deepspeed_step(engine, lambda: engine(input_ids=tokens, labels=tokens).loss), dist.barrier
    )


def _ulysses(model: nn.Module, size: dict[str, int]) -> Trainer:
    """DeepSpeed's sequence parallelism for models of Hugging Face (ALST, arXiv 2506.13996)."""
    deepspeed = importlib.import_module("deepspeed")
    ulysses = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")
    deepspeed.init_distributed(dist_backend="gloo")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mpu = ulysses.UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation="sdpa",
        sequence_parallel_size=ranks,
        micro_batch_size=size["rows"],
        seq_length=size["tokens"],
        seq_length_is_variable=False,
    )
    config = {
        "train_micro_batch_size_per_gpu": size["rows"],
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},
        "zero_optimization": {"stage": 0},
        "sequence_parallel_size": ranks,
        "steps_per_print": 1 << 30,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)
    length = size["tokens"] // ranks

    def step(tokens: Tensor) -> float:
        shifted = functional.pad(tokens[:, 1:], (0, 1), value=-100)
        mine = slice(rank * length, (rank + 1) * length)
        labels, positions = shifted[:, mine], torch.arange(size["tokens"])[None, mine].expand(size["rows"], -1)
        whole = (shifted != -100).sum()

        def loss() -> Tensor:
            logits = engine(input_ids=tokens[:, mine], position_ids=positions).logits
            total = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            return total * ranks / whole  # gradients of the ranks are averaged

        own = torch.tensor(_deepspeed_step(engine, loss)) / ranks
        dist.all_reduce(own)
        return float(own)

    return Trainer(step, dist.barrier)


def _deepspeed_step(engine: Any, loss_of: Callable[[], Tensor]) -> float:
    loss = loss_of()
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def _lowtide(model: nn.Module, size: dict[str, int], parallel: dict[str, Any], route: str, **more: Any) -> Trainer:
    lowtide = importlib.import_module("lowtide")
    config = {
        "train_micro_batch_size_per_gpu": size["rows"],
        "steps_per_print": 0,
        "device": "cpu",
        "optimizer": {"type": "adamw", "params": ADAMW},
        "zero_optimization": {"stage": 0},
        "parallel": parallel,
        "communication": {"route": route},
        **more,
    }
    engine = lowtide.initialize(model, config)
    return Trainer(lambda tokens: float(engine.train_step({"input_ids": tokens, "labels": tokens}).loss), engine.close)


BUILDERS: dict[str, Callable[..., Trainer]] = {
    "single": _single,
    "dtensor": _dtensor,
    "autotp": _autotp,
    "ulysses": _ulysses,
    "lowtide": _lowtide,
}
