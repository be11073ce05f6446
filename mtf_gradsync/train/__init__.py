"""Trains transformers that gin describes, as a function and as a command."""
