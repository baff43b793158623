"""Part `language_models` of benchmarks/gpu.sh: models of Hugging Face beside torch, FSDP2, Liger and DeepSpeed.

Each row is a process of its own, forked from one that has imported torch and transformers, with the same initial
weights, batches and AdamW. Compute is bf16: autocast for plain torch, a precision policy for FSDP2. The first steps,
which compile and choose kernels, are not timed; peaks are of the timed steps. A step ends when the device is done with
it; until launched is the host's time before it waits for that. MFU counts 6 operations for a token and a weight of a
matrix product, and the half of attention that is not masked. What is recomputed is not counted, and fp8 is held against
the peak of bf16.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import _device
import torch
from _contenders import ADAMW, BUILDERS, OFFLOAD_FOLDER, Setup, lowtide
from _gpu_part import Cell, OutOfTime, Record
from _harness import (
    Contender,
    JobError,
    OverBudget,
    Start,
    by_name,
    environment_of,
    gathered,
    over,
    run_ranks,
    warm_start,
)
from _model import SEED
from torch import Tensor, nn

IS_REHEARSAL = _device.is_rehearsal()
WARMUP, STEPS = (4, 2) if IS_REHEARSAL else (5, 5)  # graphs are captured in the third or fourth step
MOST_SECONDS = 600.0 if IS_REHEARSAL else 150.0  # of a row: one that hangs leaves time for others
USED_VOCABULARY = 256  # tokens of a batch are among so many, so that losses fall
GIB = 1 << 30


@dataclass(frozen=True)
class Shape:
    """Of a Qwen2. width of the MLP, heads of keys; is_tied: the head has the embedding's weight."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int = 151936
    is_tied: bool = True

    @property
    def matrix_numel(self) -> int:
        """The weights of all matrix products: those of the layers and the head."""
        attention = 2 * self.hidden**2 * (1 + self.kv_heads / self.heads)
        layer = int(attention) + 3 * self.hidden * self.mlp
        return self.layers * layer + self.vocabulary * self.hidden

    def flops(self, sequence: int) -> int:
        """Of a token, forward and backward."""
        return 6 * (self.matrix_numel + self.layers * self.hidden * sequence)

    def build(self, device: str) -> nn.Module:
        """Build it on a device, with the same weights in each process."""
        from transformers import Qwen2Config, Qwen2ForCausalLM

        config = Qwen2Config(
            num_hidden_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.mlp,
            vocab_size=self.vocabulary,
            tie_word_embeddings=self.is_tied,
            use_cache=False,
        )
        torch.manual_seed(SEED)
        with torch.device("cpu" if IS_REHEARSAL else device):
            model: nn.Module = Qwen2ForCausalLM(config)
        return model.to(device)


SHAPES = {
    "tiny": Shape(layers=2, hidden=64, heads=4, kv_heads=2, mlp=128, vocabulary=512),
    "0.5B": Shape(layers=24, hidden=896, heads=14, kv_heads=2, mlp=4864),
    "1.5B": Shape(layers=28, hidden=1536, heads=12, kv_heads=2, mlp=8960),
    "4B": Shape(layers=36, hidden=2560, heads=20, kv_heads=4, mlp=11008),
    "7B": Shape(layers=28, hidden=3584, heads=28, kv_heads=4, mlp=18944, vocabulary=152064, is_tied=False),
}

COMPILED: dict[str, Any] = {"compile": {"blocks": True}}
GRAPHS: dict[str, Any] = {"compile": {"blocks": True, "graphs": True}}
FP8: dict[str, Any] = {**COMPILED, "fp8": {"enabled": True, "min_features": 16 if IS_REHEARSAL else 1024}}
SEVEN_BYTES: dict[str, Any] = {
    "bf16": {"enabled": True, "masters": "int8"},
    "data_types": {"grad_accum_dtype": "bf16"},
    "optimizer": {"type": "adamw", "params": {**ADAMW, "state_dtype": "int8"}},
}
ON_CPU = {"offload_optimizer": {"device": "cpu"}}
CONTENDERS = by_name(
    Contender("torch", "torch, eager, autocast", "single"),
    Contender("torch-compiled", "torch, blocks compiled", "single", {"compiles": "blocks"}),
    Contender("torch-all-compiled", "torch, all compiled", "single", {"compiles": "all"}),
    Contender("fsdp2", "FSDP2", "fsdp2"),
    Contender("fsdp2-compiled", "FSDP2, blocks compiled", "fsdp2", {"compiles": "blocks"}),
    Contender("liger", "Liger", "single", {"patch": "liger_kernel"}),
    Contender("deepspeed", "DeepSpeed ZeRO-3", "deepspeed", {"stage": 3}),
    lowtide("lowtide", ", eager", 3),
    lowtide("lowtide-compiled", ", blocks compiled", 3, **COMPILED),
    lowtide("lowtide-graphs", ", blocks compiled, graphs", 3, **GRAPHS),
    lowtide("lowtide-fp8", ", blocks compiled, fp8", 3, **FP8),
    lowtide("lowtide-7-bytes", ", blocks compiled, 7 bytes", 3, **COMPILED, **SEVEN_BYTES),
    lowtide("lowtide-7-bytes-graphs", ", blocks compiled, 7 bytes, graphs", 3, **GRAPHS, **SEVEN_BYTES),
    lowtide("lowtide-7-bytes-fp8", ", blocks compiled, 7 bytes, fp8", 3, **FP8, **SEVEN_BYTES),
    lowtide("lowtide-states-cpu", ", blocks compiled, states on the CPU", 3, ON_CPU, **COMPILED),
    lowtide(
        "lowtide-7-bytes-cpu", ", blocks compiled, 7 bytes, states on the CPU", 3, ON_CPU, **COMPILED, **SEVEN_BYTES
    ),
)


@dataclass(frozen=True)
class Work:
    """Steps of one model by some contenders. rows: sequences of a microbatch, `accumulation` of which are a step."""

    model: str
    rows: int
    sequence: int
    accumulation: int
    contenders: tuple[str, ...]
    recomputes: bool = False

    def __str__(self) -> str:
        return f"{self.model}, {self.accumulation} x ({self.rows} x {self.sequence})"


_FIRST = tuple(name for name in CONTENDERS if name not in ("torch-all-compiled",) and "7-bytes-" not in name)
WORK = (
    Work("1.5B", 2, 2048, 4, _FIRST),
    Work("7B", 1, 2048, 4, ("lowtide-7-bytes", "lowtide-7-bytes-graphs", "lowtide-7-bytes-fp8"), recomputes=True),
    Work("4B", 1, 2048, 4, ("lowtide-7-bytes", "lowtide-states-cpu", "lowtide-7-bytes-cpu"), recomputes=True),
    Work("1.5B", 1, 4096, 4, ("torch-compiled", "fsdp2-compiled", "lowtide-compiled", "lowtide-graphs")),
    Work("0.5B", 4, 2048, 4, ("torch", "torch-compiled", "fsdp2-compiled", "lowtide-compiled", "lowtide-graphs")),
    Work("4B", 4, 2048, 8, ("lowtide-7-bytes", "lowtide-states-cpu"), recomputes=True),
    Work("1.5B", 2, 2048, 4, ("torch-all-compiled",)),
)
"""By value, since the part may be cut off."""
REHEARSED = (Work("tiny", 1, 16, 2, tuple(CONTENDERS)), Work("tiny", 1, 16, 1, ("fsdp2", "lowtide"), recomputes=True))


# -- a row, in a process of its own ----------------------------------------------------------------------------------


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Return what the steps of a row were, and what limits the row."""
    _device.prepare()
    with _device.memory_errors_leave():
        return _train(job)


def _train(job: dict[str, Any]) -> dict[str, Any]:
    torch.set_float32_matmul_precision("high")  # as users of plain torch do; all that counts is bf16
    shape, options, device = SHAPES[job["model"]], dict(job["options"]), _device.type_of_device()
    setup = Setup(
        microbatch=job["rows"],
        accumulation=job["accumulation"],
        clip=1.0,
        device=device,
        dtype="bf16",
        recompute_blocks=job["recomputes"],
        compiles=options.pop("compiles", ""),
        backend="eager" if IS_REHEARSAL else "inductor",
        blocks="model.layers",
        inputs=("input_ids", "labels"),
    )
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lowtide").addHandler(handler)
    logging.getLogger("lowtide").setLevel(logging.INFO)
    patch = options.pop("patch", None)
    from transformers.models.qwen2 import modeling_qwen2

    # No sequence is padded or packed. Else each forward would look for that in values that it reads from the device.
    vars(modeling_qwen2)["create_causal_mask"] = lambda **_: None
    model = shape.build(device)
    if patch:
        from liger_kernel.transformers import (  # type: ignore[import-not-found, unused-ignore]
            apply_liger_kernel_to_qwen2,
        )

        apply_liger_kernel_to_qwen2(model=model)
    trainer = BUILDERS[job["kind"]](model, setup, **options)
    batches = [tokens.to(device) for tokens in draw(job, WARMUP + STEPS)]
    found = _device.trained(trainer.step, [(tokens, tokens) for tokens in batches], WARMUP)
    trainer.close()
    return found | {"limits": [line for line in said if "no effect" in line or line.startswith("compile.graphs:")]}


def draw(job: dict[str, Any], num_batches: int) -> list[Tensor]:
    """Draw the batch of each step, the same for every contender: (rows of a step, sequence) int64."""
    numbers = torch.Generator().manual_seed(SEED)
    size = (job["rows"] * job["accumulation"], job["sequence"])
    return [torch.randint(USED_VOCABULARY, size, generator=numbers) for _ in range(num_batches)]


# -- the part --------------------------------------------------------------------------------------------------------


def compare(record: Record) -> None:
    missing = {name for name in ("transformers", "liger_kernel", "deepspeed") if importlib.util.find_spec(name) is None}
    for name in sorted(missing):
        record.note(f"{name} is not installed: it has no numbers here")
    if "transformers" in missing:
        return
    record.note(f"{WARMUP} steps are not timed, {STEPS} are")
    start = warm_start("torch", "torch._dynamo", "transformers.models.qwen2.modeling_qwen2", "lowtide.engine.build")
    for work in REHEARSED if IS_REHEARSAL else WORK:
        for contender in (CONTENDERS[name] for name in work.contenders):
            needed = {"deepspeed"} if contender.needs_deepspeed else {contender.options.get("patch")}
            what = f"{work}, {contender.name}"
            if not needed & missing and record.wants(what):
                with record.measuring(what):
                    add_row(record, work, contender, what, start)


def add_row(record: Record, work: Work, contender: Contender, what: str, start: Start) -> None:
    """Add a row, also for what has not trained: then its outcome is the last line of the error, or "out of memory"."""
    shape, tokens = SHAPES[work.model], work.rows * work.sequence * work.accumulation
    threads = 1 if IS_REHEARSAL else len(os.sched_getaffinity(0))  # what is offloaded is updated there
    job = vars(work) | vars(contender) | {"worker": "_gpu_language_models:train", "threads": threads}
    outcome, result = "trained", None
    with tempfile.TemporaryDirectory(prefix="offload-", dir=record.folder) as folder:
        environment = environment_of(threads, None, _device.type_of_device()) | {OFFLOAD_FOLDER: folder}
        # Peers do not know the pretended device, on which no loss of transformers has been captured yet.
        if IS_REHEARSAL and (contender.kind != "lowtide" or contender.name.endswith("graphs")):
            environment[_device.REHEARSAL] = "cpu"
        seconds = min(MOST_SECONDS, record.seconds_left)
        try:
            result = gathered(run_ranks(job, 1, sys.executable, environment, seconds, start=start))
        except OverBudget:
            outcome = "out of memory"
        except JobError as error:
            if record.seconds_left == 0.0:
                raise OutOfTime from error
            outcome = str(error).removeprefix("rank 0 ended with status 1: ")
    cells: dict[str, Cell] = {}
    if result is not None:
        speed, more = tokens / result.step_seconds, result.more
        cells = {
            "tokens_per_s": speed,
            "MFU": over(speed * shape.flops(work.sequence), _device.bf16_flops()),
            "ms_a_step": result.step_seconds * 1e3,
            "ms_until_launched": more["ms until launched"],
            "peak_GiB": over(more["allocated"], GIB),
            "reserved_GiB": over(more["reserved"], GIB),
            "losses": " ".join(f"{loss:.4f}" for loss in result.losses),
            "limits": "; ".join(more["limits"]) or None,
        }
    model = str(work) + (", recomputed" if work.recomputes else "")
    record.add("language models, bf16, one rank", model=model, contender=contender.label, outcome=outcome, **cells)
    if result is None and contender.kind == "lowtide" and not is_refusal(outcome):
        record.fail(what, outcome)


def is_refusal(outcome: str) -> bool:
    """Return whether a config was refused with words, or the device is too small: no fault, but told in the row."""
    return outcome == "out of memory" or outcome.split(":")[0].endswith(("ConfigError", "ValueError"))
