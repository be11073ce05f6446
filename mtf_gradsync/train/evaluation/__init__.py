"""Evaluates a model: held-out text, baselines, samples, the loss curve."""
