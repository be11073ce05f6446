"""What a model has learned: held-out text, baselines, samples, the loss curve."""
