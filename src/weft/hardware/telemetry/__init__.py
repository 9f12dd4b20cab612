"""What GPUs do now, from NVML: a reader that survives a driver that hangs, ``weft top`` and ``weft exporter``."""
