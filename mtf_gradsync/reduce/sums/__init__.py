"""The sums that strategies are made of: on one level, on two levels, in one order."""
