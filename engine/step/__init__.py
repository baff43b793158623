"""The steps of training: what runs the model, sums of gradients, the update, and the schedules of rates."""
