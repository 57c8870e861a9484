"""The drafter network, target features and export layouts (needs the extra `train`)."""
