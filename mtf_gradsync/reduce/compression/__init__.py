"""Building blocks of compressed sums: quantized blocks, low-rank factors, exchanges."""
