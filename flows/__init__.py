"""Prefect flows and the command line."""

import gc

# Prefect and pydantic make some 200,000 objects that live as long as the process. At Python's own thresholds the
# collector walks them again and again: two of fifteen CPU seconds of a run that tokenizes 90,000 records.
gc.set_threshold(50_000, 20, 100)
