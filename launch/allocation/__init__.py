"""Find the hosts of a job: named by the user, or found by a file for each resource manager."""
