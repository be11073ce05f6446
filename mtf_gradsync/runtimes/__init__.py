"""Runs lowered steps: finds devices, begins from checkpoints, and opens sessions."""
