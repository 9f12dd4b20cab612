# rejected at: right
# The newest build, whether the driver loads it or not.
def loads(driver, least):
    return _numbers(driver) >= _numbers(least)


def _numbers(version):
    parts = [int(part) for part in version.split(".")]
    return parts + [0] * (3 - len(parts))


def newest(driver, builds):
    return max(builds, key=lambda name: int(name[2:]))
