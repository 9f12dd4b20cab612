"""Runs both passes where the learner's tensors are, and counts what is saved between them."""


def passes(exercise, x, w, dy):
    y, saved = exercise.forward(x, w)
    storages = {
        s.untyped_storage().data_ptr(): s.untyped_storage().nbytes() for s in saved if hasattr(s, "untyped_storage")
    }
    dx, dw = exercise.gradients(dy, saved)
    return {"y": y, "dx": dx, "dw": dw, "saved_bytes": sum(storages.values())}


def slope(exercise, w, factor, row, column):
    calls = [0]

    def loss(v):
        calls[0] += 1
        return float(factor * (v**3).sum() + v.sum())

    return exercise.numeric(loss, w, row, column), calls[0], w
