"""The optimizers that there are."""

from collections.abc import Mapping

from .adadelta import ADADELTA
from .adafactor import ADAFACTOR
from .adagrad import ADAGRAD
from .adam import ADAM, ADAMW
from .adamax import ADAMAX
from .lamb import LAMB
from .lion import LION
from .muon import MUON
from .nadam import NADAM
from .onebit import ONEBIT_ADAM
from .optimizer import Optimizer
from .radam import RADAM
from .rmsprop import RMSPROP
from .sgd import SGD

_ALL = (ADAMW, ADAM, SGD, LION, ADAGRAD, RMSPROP, ADAMAX, NADAM, RADAM, ADADELTA, LAMB, MUON, ADAFACTOR, ONEBIT_ADAM)
OPTIMIZERS: Mapping[str, Optimizer] = {one.name: one for one in _ALL}
"""By name."""
