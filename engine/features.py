"""The table of step features: all that a step may have beside forward, backward and update."""

from .report.memory_report import MemoryReports
from .report.monitors import Monitors
from .report.step_log import StepLog, UnusedParts
from .report.step_profile import ProfileSection, StepProfile
from .step.averaged_weights import AveragedWeights
from .step.batch_consistency import BatchConsistencyCheck
from .step.features import StepFeature
from .step.gradient_placeholders import GradientPlaceholders
from .step.gradient_scale import LossScaleUpdate
from .step.guard import ModelGuard, ParameterFingerprints
from .step.learning_rates import LearningRates
from .step.offloaded_states import OffloadedStates
from .step.pipeline_runner import PipelineRunner
from .step.preemption import DueCheckpoints
from .step.self_checks import SavedActivations, SequenceCheck, SplitCheck
from .trial import Trial

FEATURES: tuple[type[StepFeature], ...] = (
    # Before `DueCheckpoints`: a checkpoint of this step has the rates of the next step.
    LearningRates,
    LossScaleUpdate,
    OffloadedStates,
    AveragedWeights,
    GradientPlaceholders,
    ModelGuard,
    ParameterFingerprints,
    # Sets `is_void` before the two checks of forwards ask it.
    BatchConsistencyCheck,
    PipelineRunner,
    SequenceCheck,
    SplitCheck,
    SavedActivations,
    StepLog,
    UnusedParts,
    Monitors,
    # The next three push modes on torch's stack: the recording of memory must be nested in a profile.
    StepProfile,
    ProfileSection,
    MemoryReports,
    # After all features with a state: the checkpoint has their state after this step.
    DueCheckpoints,
    # Last, as it ends the script: the features above have seen the step.
    Trial,
)
"""Each moment of a step calls them in this order. A feature that is off is not called."""
