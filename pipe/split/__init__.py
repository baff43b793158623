"""The splitting of a model over the stages of a pipeline."""
