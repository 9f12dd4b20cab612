# rejected at: right
# No GPU at all.
def scale(cuda, host, factor):
    return host * factor
