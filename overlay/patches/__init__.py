"""Patches as bytes: reading, writing, importing, and what holds between those of a series."""
