"""State that wrappers keep from step to step: names, slots, accumulators, resharding, schedules."""
