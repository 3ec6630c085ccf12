"""Headwater keeps a language model's conversation going for ever in a fixed amount of KV cache."""

__version__ = "0.1.0"
