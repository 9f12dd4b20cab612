"""``weft learn``: the runner of the course in ``weft.course``. It imports no PyTorch."""
