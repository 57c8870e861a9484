"""Ends the build of the GPU image unless it has the torch and the CUDA that it is named after."""

from __future__ import annotations

import sys

import torch


def main(arguments: list[str]) -> None:
    """Compare the installed pair with the wanted one."""
    wanted = tuple(arguments)
    found = (torch.__version__.partition("+")[0], str(torch.version.cuda))
    if found != wanted:
        sys.exit(
            f"expected torch {wanted[0]} with CUDA {wanted[1]}, found torch {found[0]} with CUDA {found[1]}: change "
            "constraints.txt and the arguments of docker/gpu.Dockerfile together"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
