"""Draws memory_by_stage.png: bytes of model states per parameter on each rank, by ZeRO stage and number of ranks.

Mixed precision with Adam: 2 bytes of parameter, 2 of gradient, 12 of fp32 master and moments.
Source: ZeRO, arXiv 1910.02054, figure 1. Run: python docs/images/draw_memory.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws to files, needs no screen
import matplotlib.pyplot as plt

RANKS = [1, 2, 4, 8, 16, 64]
STAGES = {
    "stage 0: all on every rank": (2.0, 2.0, 12.0),
    "stage 1: optimizer state divided": (2.0, 2.0, 0.0),
    "stage 2: gradients too": (2.0, 0.0, 0.0),
    "stage 3: parameters too": (0.0, 0.0, 0.0),
}
COLORS = ["#9aa5b1", "#9ecae1", "#4292c6", "#08306b"]


def main() -> None:
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    for number, (label, kept) in enumerate(STAGES.items()):
        values = [sum(kept) + (16 - sum(kept)) / ranks for ranks in RANKS]
        places = [place + 0.2 * (number - 1.5) for place in range(len(RANKS))]
        bars = axes.bar(places, values, width=0.19, label=label, color=COLORS[number])
        axes.bar_label(bars, fmt="{:.3g}", fontsize=7)
    axes.set_xticks(range(len(RANKS)), [str(ranks) for ranks in RANKS])
    axes.set(xlabel="ranks", ylabel="bytes per parameter", title="Model states on each rank, mixed precision with Adam")
    axes.set_ylim(0, 22)
    axes.legend(frameon=False, ncols=2, loc="upper right", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(__file__).with_name("memory_by_stage.png"), dpi=120)


if __name__ == "__main__":
    main()
