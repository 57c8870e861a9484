"""A folder that `datasets.save_to_disk` wrote, as it is found: its state and its data files."""

from __future__ import annotations

import json
from typing import Any, Final

from dflash.data.dataset import POINTER_KEY
from dflash.errors import DatasetError
from dflash.storage import ObjectInfo, Store

DICT_KEY: Final = "dataset_dict.json"


def list_data_files(source: Store) -> list[ObjectInfo]:
    """The data files in the order of the saved dataset, as they are listed.

    Raises:
        DatasetError: no saved dataset; several of them; or a file that it names is missing.
    """
    stored = {item.key: item for item in source.list("")}
    if POINTER_KEY not in stored:
        what = "several datasets in one (a DatasetDict): name the folder of one split" if DICT_KEY in stored else ""
        what = what or f"no {POINTER_KEY} among its {len(stored)} objects"
        raise DatasetError(f"{source.uri} is not a folder made by save_to_disk: {what}.")
    state = read_state(source)
    names = state.get("_data_files")
    if not isinstance(names, list) or not names:
        raise DatasetError(f"{source.uri}/{POINTER_KEY} names no data files. Expected what save_to_disk writes.")
    keys = [item.get("filename") if isinstance(item, dict) else None for item in names]
    missing = [str(key) for key in keys if key not in stored]
    if missing or len(set(keys)) != len(keys):
        raise DatasetError(
            f"{source.uri}/{POINTER_KEY} names {len(keys)} data files, of which {len(missing)} are missing"
            f"{', first ' + ascii(missing[0]) if missing else ' and some named twice'}. Restore the folder first."
        )
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DatasetError(f"{source.uri} is a view with row numbers. Call flatten_indices() and save it again.")
    return [stored[str(key)] for key in keys]


def read_state(store: Store) -> dict[str, Any]:
    """The folder's `state.json`.

    Raises:
        DatasetError: it is no JSON object.
    """
    where = f"{store.uri}/{POINTER_KEY}"
    try:
        state = json.loads(store.read(POINTER_KEY))
    except ValueError as error:
        raise DatasetError(f"{where} is not JSON: {error}. Expected what save_to_disk writes.") from error
    if not isinstance(state, dict):
        raise DatasetError(f"{where} holds no JSON object. Expected what save_to_disk writes.")
    return state
