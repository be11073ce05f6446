"""What a run may be given, checked before anything is built."""
