# rejected at: right
# Addresses are kept, not lines.
def misses(addresses, lines, line_bytes=64):
    kept, count = [], 0
    for address in addresses:
        if address in kept:
            kept.remove(address)
        else:
            count += 1
            if len(kept) == lines:
                kept.pop(0)
        kept.append(address)
    return count


BY_ROW = 256


BY_COLUMN = 4096


BY_COLUMN_TWICE_THE_CACHE = 256
