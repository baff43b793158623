"""The pictures that commands draw."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def picture(path: Path, width: float, height: float) -> Iterator[Any]:
    """Axes to draw on, of which a file is written at the end. width, height: inches, without what is beside the axes.

    Raises ValueError without matplotlib, which is not always there, and for a kind of file that it does not know;
    OSError where the file cannot be written.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ValueError(f'{path}: a picture needs matplotlib: pip install "lowtide[examples]" ({error})') from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(width, height))
    try:
        yield axes
        figure.savefig(path, dpi=110, bbox_inches="tight")  # as wide as a legend beside the axes needs
    finally:
        pyplot.close(figure)
