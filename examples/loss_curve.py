"""The picture of a training: its loss over the steps."""

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")  # draws to files, needs no screen
import matplotlib.pyplot as plt


def smoothed(losses: list[float], keep: float = 0.8, reach: int = 50) -> list[float]:
    """The trend at each step: of the straight line through the losses within `reach`, weighted by keep ** distance.

    A mean of the losses so far is above a loss that falls, for as long as it falls.
    """
    values = np.asarray(losses, dtype=float)
    smooth = []
    for step in range(len(values)):
        near = slice(max(0, step - reach), step + reach + 1)
        distance = np.arange(len(values))[near] - step
        weight = keep ** np.abs(distance)
        weight /= weight.sum()
        centre, level = weight @ distance, weight @ values[near]
        spread = weight @ (distance - centre) ** 2
        slope = weight @ ((distance - centre) * values[near]) / spread if spread else 0.0
        smooth.append(float(level - slope * centre))
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
