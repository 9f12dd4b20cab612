"""GPU operators, one folder per family. See ``docs/architecture.md`` for what a folder holds."""
