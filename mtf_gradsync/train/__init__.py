"""The main job: a training loop over transformers that gin describes, and the command line."""
