"""An unbounded conversation."""
