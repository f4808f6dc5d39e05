"""Check runs: what each session runs, its receipt, and bundles for machines without a network."""
