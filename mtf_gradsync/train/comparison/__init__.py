"""What a training step exchanges, bare and wrapped, side by side."""
