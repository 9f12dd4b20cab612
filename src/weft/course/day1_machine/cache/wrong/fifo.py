# rejected at: right
# First in, first out: a hit does not refresh.
def misses(addresses, lines, line_bytes=64):
    kept, count = [], 0
    for address in addresses:
        line = address // line_bytes
        if line not in kept:
            count += 1
            if len(kept) == lines:
                kept.pop(0)
            kept.append(line)
    return count


BY_ROW = 256


BY_COLUMN = 4096


BY_COLUMN_TWICE_THE_CACHE = 256
