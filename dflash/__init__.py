"""From raw LLM completions to a DFlash drafter: the library, free of orchestration."""
