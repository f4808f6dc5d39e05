"""From patched trees to wheels, and what an installed wheel says of itself."""
