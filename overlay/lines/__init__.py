"""Release lines: what a line's folder says, its faults, its lock and its record."""
