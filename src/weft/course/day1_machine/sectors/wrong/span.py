# rejected at: right
# From the first to the last, holes included.
def addresses(start, stride, lanes=32):
    return [start + 4 * stride * lane for lane in range(lanes)]


def sectors(addresses):
    return (max(addresses) + 3) // 32 - min(addresses) // 32 + 1


def used_share(addresses):
    asked = {address + byte for address in addresses for byte in range(4)}
    return len(asked) / (32 * sectors(addresses))
