"""Prefect tasks: thin, one library call each."""
