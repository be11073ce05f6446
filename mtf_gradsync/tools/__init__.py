"""What people do with the wrappers: train, verify, plan, record timelines, and islands."""
