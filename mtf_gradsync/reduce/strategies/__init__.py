"""The reduction strategies, one in each file."""
