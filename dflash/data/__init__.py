"""Completions, chat templates, loss masks, shards, quality, dataset versions."""
