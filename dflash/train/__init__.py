"""Online drafter training (needs the extra `train`)."""
