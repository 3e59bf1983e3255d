"""Packed generation: rows that leave when they end and enter when there is room."""
