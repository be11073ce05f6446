"""Several processes, each with a part of the devices of one mesh."""
