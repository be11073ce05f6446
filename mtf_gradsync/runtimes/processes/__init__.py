"""Processes that work together: they meet, and a watchdog ends all when one is lost."""
