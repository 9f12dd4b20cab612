# rejected at: right
# Names sorted as text: cu92 after cu130.
def loads(driver, least):
    return _numbers(driver) >= _numbers(least)


def _numbers(version):
    parts = [int(part) for part in version.split(".")]
    return parts + [0] * (3 - len(parts))


def newest(driver, builds):
    return max([n for n in builds if loads(driver, builds[n])], default=None)
