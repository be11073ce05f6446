"""The parts of a mesh: replica axes, groups of processors, devices, memories."""
