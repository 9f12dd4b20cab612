"""English and Chinese: a text of both, and which one is shown."""

import os
from dataclasses import dataclass

LANGUAGES = ("en", "zh")


@dataclass(frozen=True)
class Text:
    """One statement in both languages."""

    en: str
    zh: str

    def __getitem__(self, language: str) -> str:
        return self.zh if language == "zh" else self.en


def of_locale() -> str:
    """``zh`` where the locale is Chinese, else ``en``."""
    named = next((v for k in ("LC_ALL", "LC_MESSAGES", "LANG") if (v := os.environ.get(k))), "")
    return "zh" if named.lower().startswith("zh") else "en"


def known(language: str) -> str:
    """The language, when it is one of ``LANGUAGES``.

    Raises:
        ValueError: Another language.
    """
    if language not in LANGUAGES:
        raise ValueError(f"the course has no language {language!r}; it is written in en and zh")
    return language
