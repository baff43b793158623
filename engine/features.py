"""The table of what a step may have beside forward, backward and update."""

from .report.memory_report import MemoryReports
from .report.monitors import Monitors
from .report.step_log import StepLog, UnusedParts
from .report.step_profile import ProfileSection, StepProfile
from .step.averaged_weights import AveragedWeights
from .step.features import StepFeature
from .step.guard import ModelGuard
from .step.lent_states import LentStates
from .step.pipeline import Pipeline
from .step.preemption import DueCheckpoints
from .step.same_batch import SameBatch
from .step.self_checks import SavedActivations, SequenceCheck, SplitCheck
from .step.shown_gradients import ShownGradients
from .trial import Trial

FEATURES: tuple[type[StepFeature], ...] = (
    LentStates,
    AveragedWeights,
    ShownGradients,
    ModelGuard,
    SameBatch,
    Pipeline,
    SequenceCheck,
    SplitCheck,
    SavedActivations,
    StepLog,
    UnusedParts,
    Monitors,
    # Both stand on torch's stack of modes: a step whose memory is recorded lies in a profile, or beside it.
    StepProfile,
    ProfileSection,
    MemoryReports,
    DueCheckpoints,
    Trial,
)
"""In the order in which each moment of a step calls them. Those that are off are not called."""
