"""Runners make the training steps: a file for each way to run a graph."""
