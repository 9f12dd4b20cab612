"""Which Slurm job has which GPU: from a folder that prolog and epilog write, as dcgm-exporter reads it.

A file for each GPU, named after its index, has a job id on each line. Without the folder the processes on a GPU say which job
they belong to (``processes``), which misses a job that does not use its GPU.
"""

from pathlib import Path


def jobs(folder: Path) -> dict[int, list[str]]:
    """GPU index → job ids. Raises OSError where the folder cannot be read; a file that cannot be is left out."""
    found = {}
    for path in folder.iterdir():
        if path.name.isdecimal() and path.is_file():
            try:
                lines = path.read_text(errors="replace").split("\n")
            except OSError:
                continue
            ids = list(dict.fromkeys(filter(None, map(str.strip, lines))))
            if ids:
                found[int(path.name)] = ids
    return found
