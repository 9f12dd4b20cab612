# rejected at: right
# Each lane moves its own sector: nothing is shared.
def addresses(start, stride, lanes=32):
    return [start + 4 * stride * lane for lane in range(lanes)]


def sectors(addresses):
    return sum(1 for address in addresses for _ in {address // 32, (address + 3) // 32})


def used_share(addresses):
    asked = {address + byte for address in addresses for byte in range(4)}
    return len(asked) / (32 * sectors(addresses))
