"""The table of what a step may have beside forward, backward and update."""

from .report.memory_report import MemoryReports
from .report.monitors import Monitors
from .report.step_log import StepLog, UnusedParts
from .report.step_profile import ProfileSection, StepProfile
from .step.averaged_weights import AveragedWeights
from .step.batch_consistency import BatchConsistencyCheck
from .step.features import StepFeature
from .step.gradient_placeholders import GradientPlaceholders
from .step.guard import ModelGuard
from .step.offloaded_states import OffloadedStates
from .step.pipeline_runner import PipelineRunner
from .step.preemption import DueCheckpoints
from .step.self_checks import SavedActivations, SequenceCheck, SplitCheck
from .trial import Trial

FEATURES: tuple[type[StepFeature], ...] = (
    OffloadedStates,
    AveragedWeights,
    GradientPlaceholders,
    ModelGuard,
    BatchConsistencyCheck,
    PipelineRunner,
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
