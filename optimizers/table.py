"""The optimizers that there are."""

from collections.abc import Mapping

from .adagrad import ADAGRAD
from .adam import ADAM, ADAMW
from .lion import LION
from .optimizer import Optimizer
from .sgd import SGD

OPTIMIZERS: Mapping[str, Optimizer] = {one.name: one for one in (ADAMW, ADAM, SGD, LION, ADAGRAD)}
"""By name."""
