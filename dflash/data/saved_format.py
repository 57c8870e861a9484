"""The two files beside shards with which `datasets.load_from_disk` opens a folder."""

from __future__ import annotations

from typing import Any, Final

from dflash.data.shards import SHARD_SCHEMA
from dflash.manifest import Manifest, canonical_json

NO_FEATURES: Final = b'{"features":null}'  # `datasets` then takes them from the files


def datasets_state(manifest: Manifest) -> dict[str, Any]:
    """What `datasets.load_from_disk` wants to find in `state.json`: exactly these keys."""
    return {
        "_data_files": [{"filename": entry.key} for entry in manifest.shards],
        "_fingerprint": manifest.digest[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": "train",
    }


def dataset_info() -> bytes:
    """`dataset_info.json` with the features; the type name `Sequence` is read by old and new `datasets`."""
    features: dict[str, Any] = {}
    for field in SHARD_SCHEMA:
        if str(field.type).startswith("list"):
            features[field.name] = {
                "feature": {"dtype": str(field.type.value_type), "_type": "Value"},
                "_type": "Sequence",
            }
        else:
            features[field.name] = {"dtype": str(field.type), "_type": "Value"}
    return canonical_json({"citation": "", "description": "", "features": features, "homepage": "", "license": ""})
