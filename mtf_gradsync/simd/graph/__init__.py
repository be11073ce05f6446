"""Analyses the graph of a TPU program: its structure, effects, loops and collectives."""
