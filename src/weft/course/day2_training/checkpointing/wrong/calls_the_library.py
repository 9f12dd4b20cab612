# rejected at: parse
# Calls the library.
from torch.utils.checkpoint import checkpoint


def checkpointed(block, x):
    return checkpoint(block, x, use_reentrant=False)
