# rejected at: predict
# A guess: twice the cache, half the misses.
def misses(addresses, lines, line_bytes=64):
    kept = {}  # a dict keeps its order: the line used longest ago comes first
    count = 0
    for address in addresses:
        line = address // line_bytes
        if line in kept:
            del kept[line]
        else:
            count += 1
            if len(kept) == lines:
                del kept[next(iter(kept))]
        kept[line] = True
    return count


BY_ROW = 256


BY_COLUMN = 4096


BY_COLUMN_TWICE_THE_CACHE = 2048
