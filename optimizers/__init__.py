"""All optimizers, as records: see `optimizer.py`."""

from collections.abc import Mapping

from .adam import ADAM, ADAMAX, ADAMW, NADAM, ONEBIT_ADAM, RADAM
from .optimizer import Optimizer
from .sgd import ADADELTA, ADAGRAD, LION, RMSPROP, SGD
from .whole_tensor import ADAFACTOR, LAMB, MUON

_ALL = (ADAMW, ADAM, SGD, LION, ADAGRAD, RMSPROP, ADAMAX, NADAM, RADAM, ADADELTA, LAMB, MUON, ADAFACTOR, ONEBIT_ADAM)
OPTIMIZERS: Mapping[str, Optimizer] = {one.name: one for one in _ALL}
"""By name."""
