"""Prefect flows and the command line."""

import atexit
import gc

# Prefect and pydantic make some 200,000 objects that live as long as the process. At Python's own thresholds the
# collector walks them again and again: two of fifteen CPU seconds of a run that tokenizes 90,000 records. When the
# process ends it would look three times for cycles in what goes all together: most of a second.
gc.set_threshold(50_000, 20, 100)
atexit.register(gc.freeze)
