"""Command-line flags that errors name."""

from __future__ import annotations

ACCEPT_FLAG = "--accept_checkpoint_differences"
SKIP_FLAG = "--skip_damaged_checkpoint"
