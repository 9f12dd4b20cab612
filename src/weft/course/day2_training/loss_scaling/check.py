"""A sequence of updates, some of which overflow, against the rule computed here."""


def check(learner, t):
    interval = t.integers(2, 4)
    scale, good = 2.0**16, 0
    weights = [t.randn(3, 4), t.randn(7)]
    expected = [w.clone() for w in weights]
    events = ["small", "large", "inf", "large", "nan", "small", "large", "small", "large", "-inf", "small", "large"]
    for step, event in enumerate(events):
        gradients = [t.randn(3, 4).half(), t.randn(7).half()]
        if event == "small":  # below fp16's range once unscaled
            gradients = [(g.float() * 2e-4).half() for g in gradients]
        elif event != "large":
            gradients[-1][t.integers(0, 7)] = float(event)
        lr = 0.5 * scale if event == "small" else 100.0
        what = f"update number {step + 1} ({event} gradients, scale {scale:g}, {good} good, interval {interval})"
        got = t.writing(learner.update)(weights, gradients, scale, good, interval, lr)
        if event in ("small", "large"):
            for w, g in zip(expected, gradients, strict=True):
                w -= lr * (g.float() / scale)
            scale, good = (2 * scale, 0) if good + 1 == interval else (scale, good + 1)
        else:
            scale, good = scale / 2, 0
        for i, (w, e) in enumerate(zip(weights, expected, strict=True)):
            t.close(w, e, f"{what}: weights[{i}]", rtol=1e-4, atol=1e-5)
        t.equal(got, (scale, good), what)
    for power in (-40, -25, -15, -14, -3):
        gradient = 1.3 * 2.0**power
        t.equal(learner.smallest_scale(gradient), max(1, 2 ** (-14 - power)), f"smallest_scale({gradient:.3g})")
