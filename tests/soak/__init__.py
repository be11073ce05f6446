"""Soak: trains small models, hits them with faults, and looks at what is left."""
