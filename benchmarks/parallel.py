"""Splits the same Llama over ranks with lowtide, torch and DeepSpeed; compares time, peaks and bytes sent.

What is sent is counted by the kernel, on the loopback device of a network of its own where the processes may have one
(root on Linux), with headers of packets and two barriers. All losses must be those of one process. All run in the same
interpreter, since what is installed there is in their peaks.

Example, the whole comparison and then a quick look:

    python benchmarks/parallel.py --deepspeed-python PATH --json parallel.json --png parallel.png
    python benchmarks/parallel.py --contenders dtensor lowtide-tensor --rounds 1 --memory none --size tiny
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from _contenders import ADAMW, RANKS, Setup, Trainer, build_lowtide, build_single, deepspeed_config, wait_for_all
from _harness import MIB, Column, Contender, JobParser, Row, by_name, compare, count, run_steps, step_columns
from _worker import PeakSampler, sent_bytes, timed_steps
from gpu import python_path
from torch import Tensor
from torch.nn import functional


def _llama(layers: int, hidden: int, mlp: int, heads: int, vocabulary: int, sequence: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "vocab_size": vocabulary,
        "max_position_embeddings": sequence,
        "use_cache": False,
    }


SIZES = {"4 x 512": _llama(4, 512, 1408, 8, 8192, 256), "tiny": _llama(1, 32, 32, 4, 64, 16)}
SETUP = Setup(microbatch=2, inputs=("input_ids", "labels"), blocks="model.layers")
ROWS = SETUP.microbatch  # sequences of a step
_NEW_NETWORK = 0x40000000


def _split(name: str, label: str, peer: str, split: str, **more: bool) -> list[Contender]:
    """lowtide through shared memory, and over sockets."""
    return [
        Contender(
            f"lowtide-{name}{suffix}",
            f"lowtide {label}{words}",
            "lowtide",
            {"zero": {}, "more": {"parallel": {split: RANKS, **more}, "communication": {"transport": transport}}},
            peer=peer,
        )
        for transport, suffix, words in (("auto", "", ""), ("sockets", "-sockets", ", sockets"))
    ]


CONTENDERS = by_name(
    Contender("single", "one process", "single"),
    Contender("dtensor", "torch DTensor", "dtensor", {"sequence": False}),
    Contender("autotp", "DeepSpeed AutoTP", "autotp"),
    *_split("tensor", "tensor", "dtensor", "tensor"),
    Contender("dtensor-sequence", "torch DTensor, norms on parts", "dtensor", {"sequence": True}),
    *_split("tensor-sequence", "tensor, norms on parts", "dtensor-sequence", "tensor", tensor_sequence=True),
    Contender("ulysses", "DeepSpeed Ulysses", "ulysses"),
    *_split("sequence", "sequence", "ulysses", "sequence"),
)


# -- how each splits a Llama: a builder a kind -----------------------------------------------------------------------


def _dtensor(model: Any, setup: Setup, sequence: bool) -> Trainer:
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

    setup.join()
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
    for number in range(model.config.num_hidden_layers):
        layer = f"model.layers.{number}"
        plan |= {f"{layer}.self_attn.{name}_proj": columns for name in "qkv"} | {f"{layer}.self_attn.o_proj": rows}
        plan |= {f"{layer}.mlp.gate_proj": columns, f"{layer}.mlp.up_proj": columns, f"{layer}.mlp.down_proj": rows}
        if sequence:
            plan |= {f"{layer}.{norm}_layernorm": SequenceParallel() for norm in ("input", "post_attention")}
            plan[f"{layer}.self_attn"] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": part}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
            )
            plan[f"{layer}.mlp"] = PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(Replicate(),))
    parallelize_module(model, mesh, plan)
    split = [param for param in model.parameters() if isinstance(param, DTensor)]
    others = [param for param in model.parameters() if not isinstance(param, DTensor)]
    optimizers = [torch.optim.AdamW(some, fused=True, **ADAMW) for some in (split, others) if some]

    positions = torch.arange(model.config.max_position_embeddings)[None]

    def step(tokens: Tensor, _: Tensor) -> float:
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


def _autotp(model: Any, setup: Setup) -> Trainer:
    """DeepSpeed's training with AutoTP."""
    deepspeed = importlib.import_module("deepspeed")
    setup.join()
    ranks = dist.get_world_size()
    model = deepspeed.tp_model_init(model, tp_size=ranks, dtype=torch.float32)
    engine, *_ = deepspeed.initialize(model=model, config=_deepspeed_config(tensor_parallel={"autotp_size": ranks}))
    return Trainer(lambda *batch: _deepspeed_step(engine, lambda: setup.loss_of(engine, *batch)), dist.barrier)


def _ulysses(model: Any, setup: Setup) -> Trainer:
    """DeepSpeed's sequence parallelism for models of Hugging Face (ALST, arXiv 2506.13996)."""
    deepspeed = importlib.import_module("deepspeed")
    ulysses = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    ranks, rank, sequence = dist.get_world_size(), dist.get_rank(), model.config.max_position_embeddings
    mpu = ulysses.UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation="sdpa",
        sequence_parallel_size=ranks,
        micro_batch_size=ROWS,
        seq_length=sequence,
        seq_length_is_variable=False,
    )
    config = _deepspeed_config(sequence_parallel_size=ranks)
    engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)
    length = sequence // ranks

    def step(tokens: Tensor, _: Tensor) -> float:
        shifted = functional.pad(tokens[:, 1:], (0, 1), value=-100)
        mine = slice(rank * length, (rank + 1) * length)
        labels, positions = shifted[:, mine], torch.arange(sequence)[None, mine].expand(ROWS, -1)
        whole = (shifted != -100).sum()

        def loss() -> Tensor:
            logits = engine(input_ids=tokens[:, mine], position_ids=positions).logits
            total = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            return total * ranks / whole  # gradients of the ranks are averaged

        own = torch.tensor(_deepspeed_step(engine, loss)) / ranks
        dist.all_reduce(own)
        return float(own)

    return Trainer(step, dist.barrier)


def _deepspeed_config(**more: Any) -> dict[str, Any]:
    optimizer = {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}}
    return deepspeed_config(ROWS, optimizer=optimizer, zero_optimization={"stage": 0}, **more)


def _deepspeed_step(engine: Any, loss_of: Callable[[], Tensor]) -> float:
    loss = loss_of()
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


BUILDERS: dict[str, Callable[..., Trainer]] = {
    "single": build_single,
    "dtensor": _dtensor,
    "autotp": _autotp,
    "ulysses": _ulysses,
    "lowtide": build_lowtide,
}


# -- a rank ----------------------------------------------------------------------------------------------------------


def build_model(size: dict[str, Any]) -> torch.nn.Module:
    """A Llama of Hugging Face's, with the same weights in each process."""
    here = str(Path(__file__).parent)
    sys.path[:] = [folder for folder in sys.path if folder != here]  # or transformers takes kernels.py for a package
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**size))


def train(job: dict[str, Any]) -> dict[str, Any]:
    """On a rank: losses, seconds and bytes on the wire of a step, and in a memory run the peak."""
    memory, size = PeakSampler(job["allocator"] is not None), SIZES[job["size"]]
    numbers = torch.Generator().manual_seed(1)
    shape = (job["warmup"] + job["steps"], ROWS, size["max_position_embeddings"])
    batches = torch.randint(size["vocab_size"], shape, generator=numbers)
    trainer = BUILDERS[job["kind"]](build_model(size), SETUP, **job["options"])
    counters: list[int] = []

    def count_sent() -> None:
        wait_for_all()
        counters.append(sent_bytes("lo"))

    warmup, pairs = job["warmup"], [(tokens, tokens) for tokens in batches]
    found = timed_steps(trainer.step, pairs, warmup, memory, count_sent, count_sent)
    trainer.close()
    sent = [after - before for before, after in zip(counters[::2], counters[1::2], strict=True)]
    return found | {"sent": statistics.median(sent[warmup:])}


def network_of_its_own() -> bool:
    """Give this process, and all that it starts, a loopback device that nobody else uses; return whether it could."""
    if shutil.which("ip") is None or not hasattr(libc := ctypes.CDLL(None), "unshare") or libc.unshare(_NEW_NETWORK):
        return False
    return subprocess.run(["ip", "link", "set", "lo", "up"], check=False).returncode == 0


# -- the command -----------------------------------------------------------------------------------------------------


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the checked command line; end the program with a message if it is not legal."""
    parser = JobParser(__doc__, CONTENDERS, rounds=5, memory="exact", steps=(2, 8))
    parser.add_argument("--ranks", type=count(), default=2, help="that share layers or sequences (default: 2)")
    parser.add_argument("--size", choices=SIZES, default="4 x 512", help="layers and width (default: 4 x 512)")
    return parser.check(parser.parse_args(arguments))


def columns(rows: Sequence[Row], counts_bytes: bool) -> list[Column]:
    """ "its peer" is the contender with the same split."""

    def sent(row: Row) -> float | None:
        found = [job.more["sent"] for job in row.timed.values()]
        return statistics.median(found) / MIB if found and counts_bytes else None

    of_sent = Column("sent MiB/step", sent, ".1f", "sent by all ranks in a step, MiB")
    return [*step_columns(rows, "its peer"), of_sent]


def main() -> int:
    options = parse_arguments()
    counts_bytes = network_of_its_own()
    if not counts_bytes:
        print("What is sent is not counted: a network of its own takes root on Linux.")
    size = SIZES[options.size]
    title = (
        f"Llama {options.size}, {ROWS} x {size['max_position_embeddings']} tokens, fp32, {options.ranks} ranks, "
        f"{options.rounds} round(s) of {options.steps} steps"
    )
    python = str(options.deepspeed_python or sys.executable)  # the same for all
    with python_path() as path, mock.patch.dict(os.environ, {"HF_HUB_OFFLINE": "1", "PYTHONPATH": path}):
        run = partial(run_steps, "parallel:train", options, python=python)
        return compare(options, title, run, lambda rows: {title: columns(rows, counts_bytes)}, judges=True)


if __name__ == "__main__":
    sys.exit(main())
