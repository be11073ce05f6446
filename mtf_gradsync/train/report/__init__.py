"""Writes the page at the end of a run: what was trained, how it went, and the mesh traffic."""
