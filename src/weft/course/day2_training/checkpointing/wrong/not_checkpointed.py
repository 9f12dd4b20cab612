# rejected at: fast
# Calls the block as it is: right, and every activation is saved.
def checkpointed(block, x):
    return block(x)
