"""What crosses the mesh together: plans from sizes, packing, and the way from one to the other."""
