"""Tools that use the wrappers: train, verify, plan, record timelines, islands."""
