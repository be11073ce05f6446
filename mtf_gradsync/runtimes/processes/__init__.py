"""Processes of one job: they connect at the start, and a watchdog ends all when one is lost."""
