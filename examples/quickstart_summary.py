"""The last words of bin/quickstart: what the three runs showed, and what to try next."""

import json
import sys
from pathlib import Path
from typing import Any

MEBIBYTE = 1 << 20

TRY_NEXT = """\
what to try next:
  .venv/bin/lowtide launch --nproc 2 examples/train_gpt.py --config zero2 --steps 1000
  .venv/bin/python examples/train_gpt.py --config zero0 --layers 6 --width 256    # one process, a larger model
  ./bin/test                                                                      # lint, types and tests"""


def memory_row(name: str, report: dict[str, Any]) -> str:
    """One line of the table: model states, then the growth and the peak of a process, all in MiB."""
    states, start, peak = (report[key] / MEBIBYTE for key in ("model_state_bytes", "start_bytes", "peak_bytes"))
    return f"  {name:<32}{states:>12,.0f} MiB{peak - start:>12,.0f} MiB{peak:>12,.0f} MiB"


def summary(folder: Path) -> str:
    """The text for the reports in the folder. Raises FileNotFoundError where a run left none."""
    plain, sharded, trained = (
        json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("memory_stage_0", "memory_stage_3", "train")
    )
    fell = "fell" if trained["final_loss"] < trained["first_loss"] else "DID NOT FALL"
    head = f"  {'25M parameters, 2 processes':<32}{'states at rest':>16}{'training adds':>16}{'peak':>16}"
    return "\n".join(
        [
            "== what this showed",
            f"the loss {fell}: {trained['first_loss']:.3f} -> {trained['final_loss']:.3f} nats per byte "
            f"({trained['validation_loss']:.3f} on files that were not trained on), "
            f"{trained['tokens_per_second']:,.0f} tokens/s",
            "",
            "memory of each process:",
            head,
            memory_row("plain data parallelism (stage 0)", plain),
            memory_row("ZeRO stage 3", sharded),
            "",
            f"the loss curve: {trained['curve']}",
            "",
            "what the model writes after its first line:",
            *(f"  | {line}" for line in trained["sample"].splitlines()),
            "",
            TRY_NEXT,
        ]
    )


if __name__ == "__main__":
    print("\n" + summary(Path(sys.argv[1])))
