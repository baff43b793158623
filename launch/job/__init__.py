"""The launcher's side of a job: attempts, preparation, display, and failures."""
