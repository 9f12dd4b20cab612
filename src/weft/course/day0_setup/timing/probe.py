"""A machine whose clock moves only when something is called."""


def measured(exercise, durations, repeats, overhead):
    state = {"now": 1000.0, "calls": 0, "reads": 0, "last": ""}

    def call():
        if state["last"] == "call":
            state["now"] += overhead / 1e6
        state["now"] += durations[min(state["calls"], len(durations) - 1)] / 1e6
        state["calls"] += 1
        state["last"] = "call"

    def clock():
        state["reads"] += 1
        state["last"] = "clock"
        return state["now"]

    return exercise.median_us(call, clock, repeats), state["calls"], state["reads"]
