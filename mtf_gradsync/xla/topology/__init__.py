"""Compiling for TPUs that are not there, and reading what the compiler made."""
