"""What makes the training steps: one way of running a graph in each file."""
