"""Where the hosts of a job come from: one file a resource manager."""
