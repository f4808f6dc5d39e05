"""A series on another pin: carrying, verdicts with their evidence, moves, the frontier."""
