"""Numbers: comparison, streams, speed, report."""
