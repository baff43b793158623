"""The steps of training: runners of the model, sums of gradients, the update, and the schedules of rates."""
