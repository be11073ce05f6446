"""Runs programs on the devices that jax has."""
