"""Where the hosts of a job come from: the user's own words, or one file a resource manager."""
