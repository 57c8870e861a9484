"""Embedded defaults: local servers, the small real target, and the real tokenizers, with nothing to set up."""
