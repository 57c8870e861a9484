import mmap
from collections.abc import Sequence

def md5_of_each(buffers: Sequence[bytes | mmap.mmap], /) -> list[bytes]: ...
