"""Training programs: sessions, a loop over transformers that gin describes, the command line."""
