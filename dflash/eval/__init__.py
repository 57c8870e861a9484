"""Speculative decoding and acceptance length (needs the extra `train`)."""
