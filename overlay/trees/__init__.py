"""From base trees to patched trees: git's object store, strict matching, applying."""
