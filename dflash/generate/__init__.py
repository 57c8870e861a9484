"""Completions by the target: prompts in, files of finished records out, each prompt exactly once.

`session.GenerateSession` runs a batch; `regenerate` finds what a batch or dataset should have sampled anew.
"""
