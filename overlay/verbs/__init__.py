"""The verbs, by what they are for: look at lines, build them, maintain them."""
