def numbers(version):
    parts = [int(p) for p in version.split(".")]
    return parts + [0] * (3 - len(parts))


def check(learner, t):
    pairs = [
        ("525.105.17", "525.60.13"),
        ("525.60.13", "525.60.13"),
        ("525.60", "525.60.13"),
        ("580.65", "580.65.00"),
        ("1000.1.1", "580.65.06"),
        ("470.256.02", "525.60.13"),
        ("95.0.0", "525.60.13"),
    ]
    for driver, least in pairs:
        t.equal(learner.loads(driver, least), numbers(driver) >= numbers(least), f'loads("{driver}", "{least}")')
    for _ in range(12):
        versions = {"cu92": "396.26", "cu118": "450.80.02", "cu126": "525.60.13", "cu130": "580.65.06"}
        for major in (14, 15, 9):
            if t.rng.integers(2):
                versions[f"cu{major}{int(t.rng.integers(10))}"] = (
                    f"{int(t.rng.integers(380, 900))}.{int(t.rng.integers(200))}"
                )
        names = list(versions)
        t.rng.shuffle(names)
        builds = {name: versions[name] for name in names}
        driver = f"{int(t.rng.integers(300, 900))}.{int(t.rng.integers(200))}.{int(t.rng.integers(100)):02}"
        fitting = [n for n in builds if numbers(driver) >= numbers(builds[n])]
        expected = max(fitting, key=lambda n: int(n[2:]), default=None)
        t.equal(learner.newest(driver, builds), expected, f'newest("{driver}", {builds})')
