"""Measurements of speed and memory against small honest rivals; `make bench` runs them."""
