"""First in, first out."""

from weft.cluster.order import Order

ORDER = Order(
    "fifo",
    lambda jobs: (),
    "in order of submission",
    validated={
        "": "Tiresias' and Muri's traces; Helios' vcvGl",
        "-skip": "Tiresias' and Muri's traces; FGD's experiment",
        "-conservative": "a real Slurm, within a minute",
    },
)
