"""Parts of sums: each processor gets its own, and parts are put together again."""
