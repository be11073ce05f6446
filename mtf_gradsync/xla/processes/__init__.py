"""Several processes, each with some of the devices of one mesh."""
