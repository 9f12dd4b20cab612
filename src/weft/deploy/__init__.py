"""One ``cluster.yaml`` (:mod:`weft.cluster.specification`) as Kubernetes, Slurm, Compose and cloud configuration; jobs on each
of them; what the cluster costs. ``weft deploy``, ``weft launch``, ``weft cost``."""
