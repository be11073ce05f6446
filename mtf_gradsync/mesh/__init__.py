"""What a mesh is made of: replica axes, groups of processors, devices, memories."""
