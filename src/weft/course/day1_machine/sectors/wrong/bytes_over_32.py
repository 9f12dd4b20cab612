# rejected at: right
# Bytes asked for, divided by 32: as if every access were perfect.
def addresses(start, stride, lanes=32):
    return [start + 4 * stride * lane for lane in range(lanes)]


def sectors(addresses):
    return -(-4 * len(addresses) // 32)


def used_share(addresses):
    asked = {address + byte for address in addresses for byte in range(4)}
    return len(asked) / (32 * sectors(addresses))
