"""Launches of the optimizer step; dtype is that of the gradient."""

from typing import Any

import torch

from lowtide.kernels.optimizer_states import new_states, stored_states
from lowtide.kernels.optimizer_step import ShardUpdate
from lowtide.kernels.triton import optimizer_step
from lowtide.kernels.weight_rounding import Rounding
from lowtide.optimizers import OPTIMIZERS

OPTIONS: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "momentum": 0.9,
    "dampening": 0.0,
    "nesterov": False,
    "lr_decay": 0.0,
    "initial_accumulator_value": 0.0,
}


def update(
    dtype: torch.dtype,
    rule_name: str,
    state_dtype: torch.dtype = torch.float32,
    master_dtype: torch.dtype = torch.float32,
    out_dtype: torch.dtype | None = torch.bfloat16,
    num_runs: int = 1,
    numel: int = 5001,
    form: str = "",
) -> None:
    def meta(dtype: torch.dtype, numel: int = numel) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device="meta")

    master = meta(master_dtype)
    states = stored_states(list(new_states(OPTIMIZERS[rule_name], master, OPTIONS, state_dtype).values()))
    runs = [(numel * (i + 1) // num_runs, OPTIONS | {"weight_decay": 0.1 * i}) for i in range(num_runs)]
    out = meta(out_dtype) if out_dtype is not None else None
    scale, skip = meta(torch.float32, 1), meta(torch.bool, 1)
    rounding = Rounding(1, 2**40) if form in ("drawn", "split") else None
    remainder = {"with a remainder": meta(BFLOAT16), "split": meta(INT8)}.get(form)
    shard = ShardUpdate(master, meta(dtype), states, runs, [3] * num_runs, out, rounding, remainder)
    optimizer_step.update(OPTIMIZERS[rule_name], [shard, shard], 3, scale, skip)


BFLOAT16, INT8 = torch.bfloat16, torch.int8
CASES = {
    "adamw": lambda dtype: update(dtype, "adamw"),
    "adamw of a large shard": lambda dtype: update(dtype, "adamw", numel=2**31 + 1),
    "adamw with runs": lambda dtype: update(dtype, "adamw", num_runs=3),
    "adamw, states of 16 bits": lambda dtype: update(dtype, "adamw", BFLOAT16),
    "adamw, states of 8 bits, runs": lambda dtype: update(dtype, "adamw", INT8, num_runs=3),
    "adamw, all in 16 bits": lambda dtype: update(dtype, "adamw", BFLOAT16, BFLOAT16, None),
    "adamw, drawn": lambda dtype: update(dtype, "adamw", BFLOAT16, BFLOAT16, None, form="drawn"),
    "adamw, remainder": lambda dtype: update(dtype, "adamw", BFLOAT16, BFLOAT16, None, form="with a remainder"),
    "adamw, split": lambda dtype: update(dtype, "adamw", INT8, BFLOAT16, None, form="split"),
    "adam, to float16": lambda dtype: update(dtype, "adam", INT8, out_dtype=torch.float16),
    "lion": lambda dtype: update(dtype, "lion", INT8),
    "adagrad": lambda dtype: update(dtype, "adagrad", INT8, num_runs=3),
    "sgd with momentum": lambda dtype: update(dtype, "sgd", out_dtype=None),
}
# Three programs of 256 threads side by side: with 16 bytes of each tensor a thread, enough to hide memory's latency.
REGISTERS = dict.fromkeys(CASES, 80)
# Programs of 128 threads with 8 elements each: four of them side by side have more elements than three of the others.
REGISTERS |= {"adamw, drawn": 112, "adamw, remainder": 112}
REGISTERS |= {"adamw, split": 160}  # three side by side on sm_100, where it takes 148; elsewhere at most 95
