"""In-place buffers and the drop-in transformers cache."""
