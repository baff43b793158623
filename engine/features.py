"""The table of what a step may have beside forward, backward and update."""

from .report.memory_report import MemoryReports
from .report.monitors import Monitors
from .report.step_log import StepLog, UnusedParts
from .report.step_profile import ProfileSection, StepProfile
from .step.features import StepFeature
from .trial import Trial

FEATURES: tuple[type[StepFeature], ...] = (
    StepLog,
    UnusedParts,
    Monitors,
    # Both stand on torch's stack of modes: a step whose memory is recorded lies in a profile, or beside it.
    ProfileSection,
    StepProfile,
    MemoryReports,
    Trial,
)
"""In the order in which each moment of a step calls them. Those that are off are not called."""
