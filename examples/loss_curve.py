"""The picture of a training: its loss over the steps."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws to files, needs no screen
import matplotlib.pyplot as plt


def smoothed(losses: list[float], keep: float = 0.9) -> list[float]:
    """The exponential mean of the losses, corrected for its short start, so that a trend shows through the noise."""
    smooth, total, weight = [], 0.0, 0.0
    for loss in losses:
        total = keep * total + (1 - keep) * loss
        weight = keep * weight + (1 - keep)
        smooth.append(total / weight)
    return smooth


def draw_loss_curve(path: Path, losses: list[float], validation_loss: float, title: str) -> None:
    """Writes a PNG with the loss of every step, its smoothed form, and the validation loss at the end."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color="#9ecae1", linewidth=1, label="training loss")
    axes.plot(steps, smoothed(losses), color="#08519c", linewidth=2, label="training loss, smoothed")
    axes.plot([len(losses)], [validation_loss], "o", color="#d94801", label=f"validation loss {validation_loss:.3f}")
    axes.set(title=title, xlabel="step", ylabel="loss in nats per byte")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
