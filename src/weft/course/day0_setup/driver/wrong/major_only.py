# rejected at: right
# Only the first part.
def loads(driver, least):
    return int(driver.split(".")[0]) >= int(least.split(".")[0])


def _numbers(version):
    parts = [int(part) for part in version.split(".")]
    return parts + [0] * (3 - len(parts))


def newest(driver, builds):
    fitting = [name for name, least in builds.items() if loads(driver, least)]
    return max(fitting, key=lambda name: int(name[2:]), default=None)
