# rejected at: right
# A float that crosses into the next sector needs both.
def addresses(start, stride, lanes=32):
    return [start + 4 * stride * lane for lane in range(lanes)]


def sectors(addresses):
    return len({address // 32 for address in addresses})


def used_share(addresses):
    asked = {address + byte for address in addresses for byte in range(4)}
    return len(asked) / (32 * sectors(addresses))
