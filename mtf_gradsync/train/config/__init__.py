"""What gin says of a run: files, bindings, settings."""
