"""Ways of going through memory, each with what it should cost by a model and what it does cost."""
