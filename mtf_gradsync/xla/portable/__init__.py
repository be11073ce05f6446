"""Exports a step as a folder that runs with numpy and jax alone."""
