"""One rank of one job of `parallel.py`: trains a contender for some steps and writes what it saw as JSON.

Called as `_parallel_worker.py JOB.json`, with torchrun's environment variables. It needs torch and transformers alone,
so that the interpreter of another environment can run it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _memory import PeakSampler, rank_bytes
from _parallel_trainers import BUILDERS

_NETWORK = Path("/proc/self/net/dev")  # of the network that this process is in


def build_model(size: dict[str, int]) -> torch.nn.Module:
    """A Llama of Hugging Face's, with the same weights in each process."""
    here = str(Path(__file__).parent)
    sys.path[:] = [folder for folder in sys.path if folder != here]  # or transformers takes kernels.py for a package
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=size["vocabulary"],
        hidden_size=size["width"],
        intermediate_size=size["inner"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["key_heads"],
        max_position_embeddings=size["tokens"],
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def train(job: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """Losses and seconds of every step (warm-up too), bytes on the wire of a step, and in a memory run the peak."""
    size, is_memory_run = job["size"], job["allocator"] is not None
    baseline_bytes = rank_bytes(ranks) if is_memory_run else None
    numbers = torch.Generator().manual_seed(1)
    shape = (job["warmup"] + job["steps"], size["rows"], size["tokens"])
    batches = torch.randint(size["vocabulary"], shape, generator=numbers)
    trainer = BUILDERS[job["kind"]](build_model(size), size, **job["options"])
    losses: list[float] = []
    seconds: list[float] = []
    sent: list[int] = []
    sampler = PeakSampler(ranks) if is_memory_run else None
    with sampler or nullcontext():
        for tokens in batches:
            _meet()
            before, started = _sent(), time.perf_counter()
            loss = trainer.step(tokens)
            seconds.append(time.perf_counter() - started)
            losses.append(float(loss))
            _meet()
            sent.append(_sent() - before)
    result = {
        "losses": losses,
        "seconds": seconds,
        "sent": sent,
        "baseline_bytes": baseline_bytes,
        "peak_bytes": sampler.peak_bytes if sampler else None,
    }
    trainer.close()
    return result


def _sent() -> int:
    """Bytes that went over the loopback device."""
    (line,) = (line for line in _NETWORK.read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[9])


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(job["threads"])
    found = train(job, rank, ranks)
    Path(sys.argv[1]).with_name(f"rank{rank}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # [Note: Leaving] in `_worker.py`


if __name__ == "__main__":
    main()
