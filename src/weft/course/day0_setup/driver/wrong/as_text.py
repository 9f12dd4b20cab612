# rejected at: right
# Compared as text: 525.105 comes before 525.60.
def loads(driver, least):
    return driver >= least


def _numbers(version):
    parts = [int(part) for part in version.split(".")]
    return parts + [0] * (3 - len(parts))


def newest(driver, builds):
    fitting = [name for name, least in builds.items() if loads(driver, least)]
    return max(fitting, key=lambda name: int(name[2:]), default=None)
