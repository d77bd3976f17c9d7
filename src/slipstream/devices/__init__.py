"""Chips: memory, dtypes, allowed shapes, how a step is compiled."""
