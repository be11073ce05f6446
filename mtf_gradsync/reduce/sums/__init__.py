"""Building blocks of strategies: sums on one level and on two levels."""
