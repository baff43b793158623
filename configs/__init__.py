"""Ready-made configs, found by name ("zero3"), and the JSON schema of a config."""
