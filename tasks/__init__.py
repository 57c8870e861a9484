"""Prefect tasks: thin, one library call each."""

from dflash.data.without_pandas import start_arrow

start_arrow()
