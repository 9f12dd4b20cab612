"""Faults of a node's GPUs: what they mean (``catalogue``), how they are found (``kernel_log``, ``telemetry_source``,
``checks``), what is decided (``ledger``) and who carries it out (``kubernetes_node``, ``slurm_node``). Imports the
standard library alone."""
