"""A rank's report about itself: progress, stacks, who waits for whom, the limit of a step. Imports no torch."""
