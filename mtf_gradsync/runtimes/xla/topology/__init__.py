"""Compiles programs for TPUs that this machine lacks, and reads the compiled programs."""
