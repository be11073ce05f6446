"""What compressed sums are made of: blocks of whole numbers, low-rank factors, exchanges."""
