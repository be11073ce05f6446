"""Runs that are trained as a user trains them."""

from tests.tools.train.conftest import after_step, mesh_defaults, train

__all__ = ["after_step", "mesh_defaults", "train"]
