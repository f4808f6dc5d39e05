"""From a recipe to kernels: which shapes it asks for, and which the sources can answer."""
