"""Trains transformers that gin describes, as a function and as a command.

A setting that cannot work is a `ConfigError`, here and in all rooms of this package.
"""
