"""A target behind the HTTP surface of OpenAI's chat API: for small targets, tests and feeling a drafter's speed-up.

Not an inference engine: no paged cache, no streaming. Needs the extra `serve`.
"""
