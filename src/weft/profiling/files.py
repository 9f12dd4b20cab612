"""One function for every kind of file: told apart by what it begins with."""

import os
from pathlib import Path
from typing import Any


def read(path: str | os.PathLike[str]) -> Any:
    """Reads a profile: a Chrome trace (``.json``, ``.json.gz``) or an export of Nsight Systems (``.sqlite``).

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is neither, or it is damaged; the message says where.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name the traces in it: {path}/*.json.gz")
    with open(path, "rb") as file:
        head = file.read(16)
    if not head:
        raise ValueError(f"{path} is empty; expected a trace")
    if head.startswith(b"SQLite format 3"):
        from weft.profiling import nsys

        return nsys.read(path)
    if path.suffix in (".nsys-rep", ".qdrep"):
        raise ValueError(f"{path} is Nsight Systems' own form; export it first: nsys export --type sqlite {path}")
    if path.suffix == ".ncu-rep":
        raise ValueError(f"{path} is Nsight Compute's own form; print it first: ncu --import {path} --csv > report.csv")
    from weft.profiling import kineto

    return kineto.read(path)
