"""The compiled engine: struct of arrays, event-driven, deterministic."""
