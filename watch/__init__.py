"""What a rank says of itself: progress, stacks, who waits for whom, the limit of a step. Imports no torch."""
