"""The hosts of a job: names, resources, and the plan of the ranks."""
