"""Pure rules: which positions go."""
