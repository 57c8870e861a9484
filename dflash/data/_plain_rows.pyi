from typing import Final, Literal, NamedTuple

MAX_MESSAGES: Final[int]
MAX_REGISTERS: Final[int]

class PlainRow(NamedTuple):
    prompt: str
    response: str
    id: str | None
    source: str | None
    finish_reason: Literal["stop"] | None
    output_tokens: int | None
    is_thinking_only: bool
    response_head: str | None
    file: str
    line: int
    byte_offset: int
    data: bytes | None

class Planner:
    def __init__(self, controls: tuple[bytes, ...], max_prompt_characters: int, script_characters: int) -> None: ...
    def add(
        self,
        shape: bytes,
        num_texts: int,
        steps: tuple[tuple[str, int, str | None, bool | None], ...],
        prompt: tuple[str | int, ...],
        response: tuple[str | int, ...],
        /,
    ) -> None: ...
    def plan(self, block: bytes, file: str, line: int, byte_offset: int, /) -> list[PlainRow | tuple[int, int]]: ...
