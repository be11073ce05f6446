"""The page at the end of a run: what was trained, how it went, what crossed the mesh."""
