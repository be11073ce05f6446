"""Data sets, texts and vocabularies."""
