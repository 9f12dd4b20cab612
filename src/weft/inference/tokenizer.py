"""Text to tokens and back: ``tokenizer.json`` by the package ``tokenizers``, chat templates in Jinja's immutable sandbox."""

import codecs
import json
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

from weft.inference.config import read_object

INSTALL = "weft's inference needs the packages tokenizers and safetensors: pip install 'weft[gpu,inference]'"
MOST_RENDERED = 16_000_000  # characters that a chat template writes, or multiplies a text to
MOST_BITS = 4096  # of a number that a chat template computes
LAST = "\ue000the end of the last message\ue000 "  # put behind a message that the model is to continue


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
        tool_template: the one for conversations with tools, where it is another.
    """

    def __init__(
        self, backend: Any, special: dict[str, str] | None = None, template: str | None = None,
        tool_template: str | None = None,
    ):  # fmt: skip
        self.backend, self.special, self.template, self.tool_template = backend, special or {}, template, tool_template
        self._compiled: dict[str, Any] = {}  # templates by their source
        self.grammar: Any = None  # as llguidance has it, where a grammar was asked for
        self._byte_level: bool | None = None
        self._longest: int | None = None
        self._added: set[int] = set()
        self._special: set[int] | None = None

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
        settings = read_object(more) if more.is_file() else {}
        special = {}
        for name, value in settings.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                special[name] = text
        named = _templates(folder, settings.get("chat_template"))
        return cls(backend, special, named.get("default") or next(iter(named.values()), None), named.get("tool_use"))

    @property
    def size(self) -> int:
        """Tokens that there are, added ones too."""
        return int(self.backend.get_vocab_size())

    @property
    def longest(self) -> int:
        """Bytes of text that a token holds at most; four times as many where the text is normalised first."""
        if self._longest is None:
            normalised = json.loads(self.backend.to_str()).get("normalizer") is not None
            self._longest = max((len(self.token_bytes(t)) for t in self.backend.get_vocab().values()), default=1)
            self._longest *= 4 if normalised else 1
        return self._longest

    def encode(self, text: str, special: bool = True, most: int | None = None) -> list[int]:
        """Token ids; with ``special`` what the tokenizer puts around a text, such as a first token.

        Args:
            most: tokens that there is room for. A text that so many cannot hold is not looked at, which would take seconds.

        Raises:
            ValueError: a text with a lone surrogate, or that is too long.
        """
        try:
            size = len(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text has a lone surrogate at character {error.start}; expected valid Unicode"
            ) from None
        if most is not None and size > most * self.longest:
            raise ValueError(f"the text has {size} bytes, more than {most} tokens hold; expected a shorter one")
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

    def shown_bytes(self, token: int) -> bytes:
        """As :meth:`token_bytes`, of a text's token: nothing for a special one."""
        if self._special is None:
            self._special = {t for t, added in self.backend.get_added_tokens_decoder().items() if added.special}
        return b"" if token in self._special else self.token_bytes(token)

    def token_text(self, token: int) -> str:
        """The token alone as text; for part of a character ``bytes:\\xe2…``, as the OpenAI API writes it."""
        found = self.token_bytes(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in found)

    def chat(
        self, messages: Items[dict[str, Any]], /, *, continue_final_message: bool = False, **more: Any
    ) -> list[int]:
        """Token ids of a conversation, as the model's template writes it, with the beginning of an answer.

        Args:
            messages: ``{"role": ..., "content": ...}`` each.
            continue_final_message: the answer goes on from the last message, instead of beginning behind it.
            more: variables of the template, such as ``tools`` or ``add_generation_prompt``.

        Raises:
            ValueError: no template, or one that refuses the messages.
        """
        return self.encode(
            self.chat_text(messages, continue_final_message=continue_final_message, **more), special=False
        )

    def chat_text(
        self, messages: Items[dict[str, Any]], /, *, continue_final_message: bool = False, **more: Any
    ) -> str:
        """As :meth:`chat`, before it is made tokens."""
        from jinja2.exceptions import TemplateError

        source = self.tool_template if more.get("tools") and self.tool_template is not None else self.template
        if source is None:
            raise ValueError("the model has no chat template; expected one in tokenizer_config.json, or a plain prompt")
        if isinstance(messages, str) or not all(isinstance(each, dict) for each in messages):
            given = f"argument 'messages' is {messages!r:.80}"
            raise ValueError(f'{given}; expected a list of {{"role": ..., "content": ...}}')
        messages = [*messages]
        if continue_final_message:
            if not messages or not isinstance(messages[-1].get("content"), str):
                raise ValueError("a conversation to continue ends with a message whose content is text")
            messages[-1] = {**messages[-1], "content": messages[-1]["content"] + LAST}
        try:
            if source not in self._compiled:
                self._compiled[source] = _environment().from_string(source)
            variables = {
                "add_generation_prompt": not continue_final_message,
                "tools": None,
                "documents": None,
                **self.special,
                **more,
            }
            text, size = [], 0
            for part in self._compiled[source].generate({**variables, "messages": messages}):
                text.append(part)
                size += len(part)
                if size > MOST_RENDERED:
                    raise ValueError(f"it writes more than {MOST_RENDERED} characters")
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            RecursionError,
            ArithmeticError,
            MemoryError,
        ) as error:
            raise ValueError(f"the model's chat template refuses these messages: {error}") from None
        whole = "".join(text)
        if not continue_final_message:
            return whole
        end = whole.rfind(LAST.strip())
        if end < 0:
            raise ValueError(
                "the model's chat template does not write the last message's text, so it cannot be continued"
            )
        return whole[:end] if whole.startswith(LAST, end) else whole[:end].rstrip()  # as it trims messages

    def stream(self, stop: Items[str] = ()) -> "TextStream":
        return TextStream(self, stop)


def _templates(folder: Path, given: Any) -> dict[str, str]:
    """A folder's chat templates by name: of tokenizer_config.json (``given``), and before those, of files."""
    named = {"default": given} if not isinstance(given, list) else {
        str(e.get("name")): e.get("template") for e in given if isinstance(e, dict)
    }  # fmt: skip
    for text in named.values():
        if text is not None and not isinstance(text, str):
            where = folder / "tokenizer_config.json"
            raise ValueError(f"{where}: chat_template is {text!r:.80}; expected a text, or a list of them by name")
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (own := folder / "chat_template.jinja").is_file():
        files["default"] = own
    for name, path in files.items():
        try:
            named[name] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is no text in UTF-8: {error}") from None
    return {name: text for name, text in named.items() if text is not None}


def _environment() -> Any:
    """Jinja without access to Python's attributes, as Hugging Face's chat templates expect it."""
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension
    from jinja2.nodes import Scope
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}``, by which training finds the answers: what is in it is written as it is."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)

    class Sandbox(ImmutableSandboxedEnvironment):
        """Refuses products and powers that would not fit; no time limit could end them."""

        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            bits = [x.bit_length() if isinstance(x, int) else 0 for x in (left, right)]
            if (bits[0] * right if operator == "**" and bits[0] and bits[1] else sum(bits)) > MOST_BITS:
                raise ValueError(f"it computes a number of more than {MOST_BITS} bits")
            for text, times in ((left, right), (right, left)):
                if (
                    operator == "*"
                    and hasattr(text, "__len__")
                    and isinstance(times, int)
                    and len(text) * times > MOST_RENDERED
                ):
                    raise ValueError(f"it repeats a text to more than {MOST_RENDERED} characters")
            return super().call_binop(context, operator, left, right)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def as_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators and tuple(separators),
            sort_keys=sort_keys,
        )

    def now(form: str) -> str:
        from datetime import datetime

        return datetime.now().strftime(form)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation])
    environment.filters["tojson"] = as_json
    environment.globals.update(raise_exception=refuse, strftime_now=now)
    return environment


class TextStream:
    """The text of tokens as they come: only whole characters, and nothing that may be the beginning of a stop text."""

    def __init__(self, tokenizer: Tokenizer, stop: Items[str] = ()):
        from tokenizers.decoders import DecodeStream

        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.decoder = DecodeStream(skip_special_tokens=True)
        self.bytes: Any = None  # instead of ``decoder``, once it has failed
        self.tokens: list[int] = []
        self.certain = 0  # tokens whose text is in ``made``
        self.made, self.given = "", 0  # text so far, and how much of it was handed out
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that is certain now; after a stop text came, ``stopped`` is set and nothing follows."""
        self.tokens.append(token)
        try:
            piece = self._of_bytes() if self.bytes else self.decoder.step(self.tokenizer.backend, token)
        except (
            Exception
        ):  # the package raises nothing narrower: bytes that are no UTF-8 change the text that it gave before
            piece = self._of_bytes()
        if not piece:
            return ""
        self.certain = len(self.tokens)
        self.made += piece
        if not self.stop:  # nothing is held back
            self.given += len(piece)
            return piece
        return self._ready()

    def _of_bytes(self, final: bool = False) -> str:
        """The text of tokens that are not certain yet by their bytes; U+FFFD for what is no UTF-8."""
        self.bytes = self.bytes or codecs.getincrementaldecoder("utf-8")("replace")
        more, self.certain = self.tokens[self.certain :], len(self.tokens)
        found: str = self.bytes.decode(b"".join(map(self.tokenizer.shown_bytes, more)), final)
        return found

    def finish(self) -> str:
        """What is held back still, with U+FFFD for a character that was not completed."""
        if self.stopped:
            return ""
        whole = "" if self.bytes else self.tokenizer.decode(self.tokens)
        self.made = whole if whole and whole.startswith(self.made) else self.made + self._of_bytes(final=True)
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
