# rejected at: right
# Nothing is thrown away.
def misses(addresses, lines, line_bytes=64):
    return len({address // line_bytes for address in addresses})


BY_ROW = 256


BY_COLUMN = 4096


BY_COLUMN_TWICE_THE_CACHE = 256
