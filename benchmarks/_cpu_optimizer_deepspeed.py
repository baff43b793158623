"""DeepSpeedCPUAdam in an environment of its own: for each line on standard input one step, its seconds as the answer.

Called by `cpu_optimizer.py` as `_cpu_optimizer_deepspeed.py NUMEL THREADS OUT GRADIENT`. DeepSpeed builds its C++
operation when it is first asked for it.
"""

from __future__ import annotations

import os
import sys
import time

import torch


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the build prints is no answer
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]

    numel, threads = int(sys.argv[1]), int(sys.argv[2])
    out_dtype, gradient_dtype = (None if name == "none" else getattr(torch, name) for name in sys.argv[3:5])
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(numel, generator=generator))
    # Its operation takes a gradient of the weight's dtype only, so a narrow one is widened first, in the timed part.
    gradient = (0.01 * torch.randn(numel, generator=generator)).to(gradient_dtype)
    out = None if out_dtype is None else torch.empty(numel, dtype=out_dtype)
    optimizer = DeepSpeedCPUAdam([weight], lr=1e-3, weight_decay=0.1, adamw_mode=True)
    answers.write("ready\n")
    for _ in sys.stdin:
        started = time.perf_counter()
        weight.grad = gradient.float()
        optimizer.step()
        if out is not None:
            out.copy_(weight.detach())
        answers.write(f"{time.perf_counter() - started}\n")


if __name__ == "__main__":
    main()
