"""``weft top``: what every GPU does now, and for whom; a terminal program over the tables of ``view``."""

from collections.abc import Callable

from weft.hardware.telemetry.view import ORDERS, View, gpu_table, head, process_table

try:
    from textual import work
    from textual.app import App, ComposeResult
    from textual.containers import VerticalScroll
    from textual.widgets import Footer, Static
except ModuleNotFoundError as error:
    raise ImportError(
        f"weft top needs {error.name}: pip install 'weft[telemetry]' (or textual); --once does not"
    ) from None


class Top(App[None]):
    """Reads in a thread, so that a driver that hangs does not stop the keys.

    Args:
        read: gives the next view; it may take seconds.
        interval_s: between readings.
    """

    TITLE = "weft top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: auto; padding: 0 1; }
    #gpus { height: auto; padding: 0 1; }
    #processes { height: auto; padding: 0 1; }
    """
    BINDINGS = [  # noqa: RUF012 (as Textual declares it)
        ("q", "quit", "quit"),
        ("space", "pause", "pause or go on"),
        ("s", "sort", "sort processes"),
    ]

    def __init__(self, read: Callable[[], View], interval_s: float = 2.0) -> None:
        super().__init__()
        self.read, self.interval_s = read, interval_s
        self.paused, self.reading = False, False
        self.order = next(iter(ORDERS))
        self.view: View | None = None

    def compose(self) -> ComposeResult:
        yield Static("reading …", id="head")
        with VerticalScroll():
            yield Static(id="gpus")
            yield Static(id="processes")
        yield Footer()

    def on_mount(self) -> None:
        self.tick()
        self.set_interval(self.interval_s, self.tick)

    def tick(self) -> None:
        if not self.paused and not self.reading:
            self.reading = True
            self.take()

    @work(thread=True)
    def take(self) -> None:
        view = self.read()
        self.call_from_thread(self.show, view)

    def show(self, view: View) -> None:
        self.reading, self.view = False, view
        self.draw()

    def draw(self) -> None:
        if self.view is None:
            return
        line = head(self.view)
        line.append(f"   {'paused, ' if self.paused else ''}by {self.order}", style="dim")
        self.query_one("#head", Static).update(line)
        self.query_one("#gpus", Static).update(gpu_table(self.view))
        self.query_one("#processes", Static).update(process_table(self.view, self.order))

    def action_pause(self) -> None:
        self.paused = not self.paused
        self.draw()

    def action_sort(self) -> None:
        names = list(ORDERS)
        self.order = names[(names.index(self.order) + 1) % len(names)]
        self.draw()
