"""Text to tokens and back: ``tokenizer.json`` by the package ``tokenizers``, chat templates in Jinja's immutable sandbox."""

import json
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

INSTALL = "weft's inference needs the packages tokenizers and safetensors: pip install 'weft[gpu,inference]'"
MOST_TEMPLATE = 1_000_000  # characters of a template, and of what it renders for each message


def _bytes_of_characters() -> dict[str, int]:
    """Byte-level BPE writes printable bytes as their Latin-1 characters, and the others, in order, from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [b for b in range(256) if b not in printable]
    return {**{chr(b): b for b in printable}, **{chr(256 + i): b for i, b in enumerate(rest)}}


_BYTES = _bytes_of_characters()


class Tokenizer:
    """A ``tokenizers.Tokenizer`` with a model's special tokens and chat template.

    Args:
        backend: the ``tokenizers.Tokenizer``.
        special: names of special tokens as templates use them, such as ``bos_token``, to their texts.
        template: the chat template's source, or None.
    """

    def __init__(self, backend: Any, special: dict[str, str] | None = None, template: str | None = None):
        self.backend, self.special, self.template = backend, special or {}, template
        self._rendered: Any = None
        self.grammar: Any = None  # as llguidance has it, where a grammar was asked for
        self._byte_level: bool | None = None
        self._added: set[int] = set()

    @classmethod
    def read(cls, folder: str | Path) -> "Tokenizer":
        """Of a model folder.

        Raises:
            FileNotFoundError: no ``tokenizer.json``.
            ValueError: a broken one.
        """
        try:
            from tokenizers import Tokenizer as Backend
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(INSTALL, name=missing.name) from missing
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder} has no tokenizer.json; expected one (AutoTokenizer.save_pretrained writes it)"
            )
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the package raises nothing narrower
            raise ValueError(f"{path} is no tokenizer: {error}") from None
        more = folder / "tokenizer_config.json"
        settings = json.loads(more.read_text(encoding="utf-8")) if more.is_file() else {}
        special = {}
        for name, value in settings.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                special[name] = text
        template = settings.get("chat_template")
        if isinstance(template, list):  # several, by name
            named = {entry.get("name"): entry.get("template") for entry in template}
            template = named.get("default") or next(iter(named.values()), None)
        if (own := folder / "chat_template.jinja").is_file():
            template = own.read_text(encoding="utf-8")
        return cls(backend, special, template)

    @property
    def size(self) -> int:
        """Tokens that there are, added ones too."""
        return int(self.backend.get_vocab_size())

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids; with ``special`` what the tokenizer puts around a text, such as a first token.

        Raises:
            ValueError: a text with a lone surrogate.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text has a lone surrogate at character {error.start}; expected valid Unicode"
            ) from None
        ids: list[int] = self.backend.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, tokens: Items[int], skip_special: bool = True) -> str:
        text: str = self.backend.decode(list(tokens), skip_special_tokens=skip_special)
        return text

    def token_bytes(self, token: int) -> bytes:
        """The bytes of UTF-8 that a token is, which may be part of a character; a special token's name."""
        piece = self.backend.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level is None:
            self._byte_level = "ByteLevel" in json.dumps(json.loads(self.backend.to_str()).get("decoder"))
            self._added = set(self.backend.get_added_tokens_decoder())
        if token in self._added:
            return piece.encode()
        if self._byte_level:
            return bytes(_BYTES[c] for c in piece) if all(c in _BYTES for c in piece) else piece.encode()
        if len(piece) == 6 and piece.startswith("<0x"):  # SentencePiece's fallback
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode()

    def token_text(self, token: int) -> str:
        """The token alone as text; for part of a character ``bytes:\\xe2…``, as the OpenAI API writes it."""
        found = self.token_bytes(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in found)

    def chat(self, messages: Items[dict[str, Any]], **more: Any) -> list[int]:
        """Token ids of a conversation, as the model's template writes it, with the beginning of an answer.

        Args:
            messages: ``{"role": ..., "content": ...}`` each.
            more: variables of the template, such as ``tools`` or ``add_generation_prompt``.

        Raises:
            ValueError: no template, or one that refuses the messages.
        """
        return self.encode(self.chat_text(messages, **more), special=False)

    def chat_text(self, messages: Items[dict[str, Any]], **more: Any) -> str:
        from jinja2.exceptions import TemplateError

        if self.template is None:
            raise ValueError("the model has no chat template; expected one in tokenizer_config.json, or a plain prompt")
        try:
            if self._rendered is None:
                self._rendered = _environment().from_string(self.template)
            variables = {"add_generation_prompt": True, **self.special, **more}
            text: str = self._rendered.render(messages=list(messages), **variables)
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            RecursionError,
            ArithmeticError,
        ) as error:
            raise ValueError(f"the model's chat template refuses these messages: {error}") from None
        return text

    def stream(self, stop: Items[str] = ()) -> "TextStream":
        return TextStream(self, stop)


def _environment() -> Any:
    """Jinja without access to Python's attributes, as Hugging Face's chat templates expect it."""
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def as_json(value: Any, indent: int | None = None, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    def now(form: str) -> str:
        from datetime import datetime

        return datetime.now().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = as_json
    environment.globals.update(raise_exception=refuse, strftime_now=now)
    return environment


class TextStream:
    """The text of tokens as they come: only whole characters, and nothing that may be the beginning of a stop text."""

    def __init__(self, tokenizer: Tokenizer, stop: Items[str] = ()):
        from tokenizers.decoders import DecodeStream

        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.decoder = DecodeStream(skip_special_tokens=True)
        self.tokens: list[int] = []
        self.made, self.given = "", 0  # text so far, and how much of it was handed out
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that is certain now; after a stop text came, ``stopped`` is set and nothing follows."""
        self.tokens.append(token)
        piece = self.decoder.step(self.tokenizer.backend, token)
        if piece:
            self.made += piece
        return self._ready() if piece else ""

    def finish(self) -> str:
        """What is held back still, with U+FFFD for a character that was not completed."""
        if self.stopped:
            return ""
        whole = self.tokenizer.decode(self.tokens)
        if whole.startswith(self.made):
            self.made = whole
        held = self.made[self.given :]
        self.given = len(self.made)
        return held

    def _ready(self) -> str:
        found = [at for text in self.stop if (at := self.made.find(text, max(0, self.given))) >= 0]
        if found:
            self.stopped = True
            ready, self.made = self.made[self.given : min(found)], self.made[: min(found)]
            self.given = len(self.made)
            return ready
        held = 0  # characters at the end with which a stop text may begin
        for text in self.stop:
            for n in range(min(len(text) - 1, len(self.made) - self.given), held, -1):
                if self.made.endswith(text[:n]):
                    held = n
                    break
        end = len(self.made) - held
        ready, self.given = self.made[self.given : end], end
        return ready
