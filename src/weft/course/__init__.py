"""The seven-day course: its ladders of teaching versions."""
