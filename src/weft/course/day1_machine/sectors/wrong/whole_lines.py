# rejected at: right
# Cache lines of 128 bytes, which need not move whole.
def addresses(start, stride, lanes=32):
    return [start + 4 * stride * lane for lane in range(lanes)]


def sectors(addresses):
    return 4 * len({byte // 128 for address in addresses for byte in (address, address + 3)})


def used_share(addresses):
    asked = {address + byte for address in addresses for byte in range(4)}
    return len(asked) / (32 * sectors(addresses))
