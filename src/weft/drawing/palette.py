"""The page's colours: name → (light mode, dark mode).

The style sheet takes them as variables. Charts are drawn with the light ones, and the page exchanges each for its dark
partner before it draws where the reader prefers dark; so no two names may share a light colour.
"""

COLORS = {
    "paper": ("#fcfcfa", "#15181b"),
    "panel": ("#f4f4f0", "#1c2024"),
    "ink": ("#1b1e22", "#e8e8e4"),
    "muted": ("#5d636b", "#a3a9b0"),
    "rule": ("#dcdcd5", "#343a40"),
    "ours": ("#0f6b6b", "#4fb8b3"),  # weft's own implementations
    "second": ("#a4501c", "#e09a5f"),  # a second line or roof beside them
    "peer": ("#d3d5d2", "#3d444a"),  # what one would use otherwise
    "hatch": ("#767c82", "#8d949b"),
    "good": ("#1f6f3a", "#6cc088"),
    "bad": ("#b0271f", "#f08a80"),
    "warn": ("#8a6100", "#d9b45a"),
}

# What tells apart the reasons that jobs wait for: a colour, a hatch, and the symbol of both in a legend.
WAITS = {
    "priority": ("peer", "blank", "■"),
    "quota": ("hatch", "dot", "◘"),
    "capacity": ("ours", "right_diagonal_line", "▨"),
    "type": ("good", "vertical_line", "▥"),
    "memory": ("bad", "horizontal_line", "▤"),
    "gang": ("second", "left_diagonal_line", "▧"),
    "topology": ("second", "ring", "◎"),
    "host": ("muted", "cross", "▦"),
    "fragmentation": ("warn", "diagonal_cross", "▩"),
}

LIGHT = {name: light for name, (light, _) in COLORS.items()}
TO_DARK = {light: dark for light, dark in COLORS.values()}


def variables(mode: int) -> str:
    """The colours of a mode (0 light, 1 dark) as CSS custom properties."""
    return " ".join(f"--{name}: {pair[mode]};" for name, pair in COLORS.items())
