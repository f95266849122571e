"""Text to token ids and back, and chats to text.

From a Hugging Face directory (tokenizer.json) or rebuilt from a GGUF file. Equal to transformers on
the same model.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from coterie.core.errors import InvalidRequest, WeightsError
from coterie.core.request import Chat, Message, Prompt, Text, Tokens
from coterie.core.sampling import NO_RECOMMENDATION, ModelRecommendation
from coterie.models.config_fields import shown
from coterie.models.recommended import directory_names, gguf_names, recommended_for
from coterie.models.text.chat_template import ChatTemplate, request_template
from coterie.models.text.gguf_tokenizer import rebuild_tokenizer
from coterie.models.text.tool_format import ToolSupport, tool_support, turns_of
from coterie.weights.files import read_json
from coterie.weights.formats.gguf import GGUFFile, only_gguf, read_gguf
from coterie.weights.formats.gguf_config import hf_generation

# one text at a time has no use for a pool of threads, which ends the process where the system
# refuses their memory
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_SPECIAL_KEYS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
_RESERVED = frozenset({"messages", "add_generation_prompt"})
_THINK = ("<think>", "</think>")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MAX_TEMPLATE_BYTES = 4_000_000
# a prompt with more characters is encoded in a thread: it would block the event loop for 5 ms
MAX_INLINE_CHARACTERS = 8_000
# roughly what a message adds to a prompt in addition to its words
_MESSAGE_CHARACTERS = 50


def is_long(prompt: Prompt) -> bool:
    """Whether rendering and encoding it would block an event loop for too long."""
    if isinstance(prompt, Chat):
        if prompt.template is not None:
            # a template from the request, which may do anything
            return True
        size = sum(len(json.dumps(tool)) for tool in prompt.tools)
        for message in prompt.messages:
            size += _MESSAGE_CHARACTERS + len(message.content)
            size += sum(len(call.arguments) for call in message.tool_calls)
        return size > MAX_INLINE_CHARACTERS
    return isinstance(prompt, Text) and len(prompt.text) > MAX_INLINE_CHARACTERS


@dataclass(frozen=True, slots=True)
class _Parts:
    """What each format provides; `Tokenizer` does the rest."""

    backend: tokenizers.Tokenizer
    specials: dict[str, str]
    chat_template: str | None
    eos_ids: tuple[int, ...]
    # by the authors of the model
    recommended: ModelRecommendation = NO_RECOMMENDATION


def load_tokenizer(path: Path, header: GGUFFile | None = None) -> Tokenizer:
    """For a GGUF file, a directory with one, or a Hugging Face directory. `header`: of the GGUF
    file, if it was read before."""
    path = Path(path)
    if header is not None:
        return Tokenizer(_from_gguf(header))
    if path.is_dir():
        inside = only_gguf(path)
        if inside is None or (path / "tokenizer.json").exists():
            return Tokenizer(_from_directory(path))
        path = inside
    return Tokenizer(_from_gguf(read_gguf(path)))


class Tokenizer:
    def __init__(self, parts: _Parts) -> None:
        self._backend = parts.backend
        self._specials = parts.specials
        self.chat_template = parts.chat_template
        self._template = (
            ChatTemplate(parts.chat_template, parts.specials) if parts.chat_template else None
        )
        vocab = parts.backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocab.values(), default=-1) + 1
        self.bos_id: int | None = vocab.get(parts.specials.get("bos_token", ""))
        own = vocab.get(parts.specials.get("eos_token", ""))
        ends = [*parts.eos_ids, *([] if own is None else [own])]
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys(ends))
        self._added = dict(parts.backend.get_added_tokens_decoder())
        self._byte_level = "ByteLevel" in repr(parts.backend.decoder)
        in_vocab = all(token in vocab for token in _THINK)
        in_template = all(token in (parts.chat_template or "") for token in _THINK)
        self.reasoning: tuple[str, str] | None = _THINK if in_vocab or in_template else None
        self.tool_support: ToolSupport = tool_support(parts.chat_template)
        self.recommended = parts.recommended

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """`special`: add BOS and the like, as the tokenizer's post-processor says."""
        try:
            # the batch call lets other threads run; `encode` keeps the interpreter lock for
            # seconds on a long text
            encoded = self._backend.encode_batch_fast([text], add_special_tokens=special)
            ids: list[int] = encoded[0].ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest("the text holds half of a surrogate pair, not Unicode") from error
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        known = [token_id for token_id in ids if 0 <= token_id < self.vocab_size]
        return str(self._backend.decode(known, skip_special_tokens=skip_special))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; none for an id without a token."""
        if token_id in self._added:
            return self._added[token_id].content.encode()
        token = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None:
            return b""
        if self._byte_level:
            try:
                return token.translate(_BYTE_OF).encode("latin-1")
            except UnicodeEncodeError:  # a character stands for no byte
                return token.encode()
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()

    def is_special(self, token_id: int) -> bool:
        return token_id in self._added and self._added[token_id].special

    def token_id(self, token: str) -> int | None:
        """The id of a token that the vocabulary holds whole."""
        found: int | None = self._backend.token_to_id(token)
        return found

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Tokens that are not text, by name."""
        return {item.content: key for key, item in self._added.items() if item.special}

    @cached_property
    def never_text_id(self) -> int | None:
        """The token of the byte 0xFF, which occurs in no text."""
        token: int | None = self._backend.token_to_id("\xff" if self._byte_level else "<0xFF>")
        return token

    @cached_property
    def card_system(self) -> str:
        """The system prompt of the model's card, for chats without a system message; "" if the
        card has none, or the template writes its own or takes none."""
        prompt, template = self.recommended.system_prompt, self._template
        takes = prompt and template is not None and template.system_default is False
        return prompt if takes else ""

    @property
    def writes_system(self) -> bool:
        """Whether the template writes a system prompt into a chat without a system message."""
        return self._template is not None and self._template.system_default is True

    def adds_system_to(self, chat: Chat) -> bool:
        """Whether the chat gets the system prompt of the model's card."""
        if not self.card_system or not chat.adds_system or chat.template is not None:
            return False
        return all(message.role != "system" for message in chat.messages)

    def readable(self, prompt: Prompt, *, with_adapters: bool = False) -> Prompt:
        """The prompt as this model reads it: as plain text if it may be that and there is no
        template, and without the card's system prompt for adapters, which were trained without
        it."""
        if not isinstance(prompt, Chat):
            return prompt
        if prompt.may_be_text and self._template is None and prompt.template is None:
            return Text(prompt.messages[-1].content)
        if with_adapters and prompt.adds_system and self.card_system:
            return replace(prompt, adds_system=False)
        return prompt

    def render(self, chat: Chat) -> str:
        """The chat as one text, by the model's own template."""
        template = self._template
        support = self.tool_support
        if chat.template is not None:
            template = request_template(chat.template, tuple(sorted(self._specials.items())))
            support = tool_support(chat.template)
            if chat.tools and support.format != self.tool_support.format:
                raise InvalidRequest(
                    f"chat_template: with tools it must write calls as this model does "
                    f"({self.tool_support.format.name})",
                    param="chat_template",
                )
        if template is None:
            raise InvalidRequest(
                "the model has no chat template; use the completions API", param="messages"
            )
        reserved = _RESERVED & chat.template_kwargs.keys()
        if reserved:
            raise InvalidRequest(
                f"chat_template_kwargs cannot set {', '.join(sorted(reserved))}",
                param="chat_template_kwargs",
            )
        if self.adds_system_to(chat):
            system = Message("system", self.card_system)
            chat = replace(chat, messages=(system, *chat.messages))
        messages, tools = turns_of(_with_its_systems(chat, template), support)
        given = {**chat.template_defaults, **chat.template_kwargs}
        options = {**given, "add_generation_prompt": chat.add_generation_prompt}
        if tools is not None:
            options["tools"] = tools
        is_open = not (chat.add_generation_prompt or chat.closes_last)
        if not is_open or not messages or messages[-1]["role"] != "assistant":
            return template.render(messages, options)
        return template.render_open(messages, options)

    def text_of(self, prompt: Chat | Text) -> str:
        return self.render(prompt) if isinstance(prompt, Chat) else prompt.text

    def encode_text(self, prompt: Chat | Text, text: str) -> list[int]:
        """A template writes its own special tokens, unless the prompt says otherwise."""
        return self.encode(text, special=prompt.add_special_tokens)

    def least_tokens(self, text: str) -> int:
        """A lower bound of its tokens, found without encoding it."""
        return 0 if self._bound is None else self._bound.least_tokens(text)

    @cached_property
    def _bound(self) -> TokenBound | None:
        return token_bound(self._backend)

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, Tokens):
            return self.encode_text(prompt, self.text_of(prompt))
        for token_id in prompt.ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(
                    f"token id {token_id} is outside of the vocabulary of {self.vocab_size}",
                    param="prompt",
                )
        return list(prompt.ids)

    def facts(self) -> dict[str, Any]:
        """As in a tokenizer_config.json."""
        added = {
            str(key): {"content": item.content, "special": item.special}
            for key, item in sorted(self._added.items())
        }
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self._specials,
            "added_tokens_decoder": added,
            "chat_template": self.chat_template,
            "vocab_size": self.vocab_size,
        }

    def fingerprint(self) -> str:
        """sha256 of everything that decides ids and rendered text."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256(self._backend.to_str().encode())
        digest.update(repr((self.chat_template, self._specials, self.eos_ids)).encode())
        return digest.hexdigest()


def _with_its_systems(chat: Chat, template: ChatTemplate) -> Chat:
    """System messages stay apart and where they are if the template writes all of them; else they
    are one at the start. So a conversation is one prompt, whatever API it came by."""
    places = [at for at, message in enumerate(chat.messages) if message.role == "system"]
    if not places or places == [0]:
        return chat
    in_between = places != list(range(len(places)))
    if template.takes_systems(in_between=in_between):
        return chat
    text = "\n\n".join(chat.messages[at].content for at in places)
    others = (message for message in chat.messages if message.role != "system")
    return replace(chat, messages=(Message("system", text), *others))


def _from_gguf(file: GGUFFile) -> _Parts:
    rebuilt = rebuild_tokenizer(file)
    ends = hf_generation(file).get("eos_token_id", [])
    advice = recommended_for(gguf_names(file.path, file.metadata))
    return _Parts(rebuilt.backend, rebuilt.specials, rebuilt.chat_template, tuple(ends), advice)


def _from_directory(path: Path) -> _Parts:
    source = path / "tokenizer.json"
    if not source.exists():
        raise WeightsError(
            f"{source}: missing. Give a directory with tokenizer.json (convert older tokenizers "
            "with transformers' save_pretrained)."
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(source))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the Rust library is not an Exception
        raise WeightsError(f"{source}: not a valid tokenizer ({error}). Fetch it again.") from error
    backend.no_truncation()
    backend.no_padding()
    settings = _optional(path / "tokenizer_config.json")
    _check_settings(settings, path / "tokenizer_config.json")
    _check_settings(_optional(path / "special_tokens_map.json"), path / "special_tokens_map.json")
    specials = _named_specials({**_optional(path / "special_tokens_map.json"), **settings})
    _add_missing(backend, specials, settings)
    advice = recommended_for(directory_names(path))
    return _Parts(backend, specials, _template_in(path, settings), _eos_in(path), advice)


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _check_settings(settings: dict[str, Any], file: Path) -> None:
    """Refuse fields that would be ignored although they change how a prompt is encoded."""
    kinds: dict[str, tuple[tuple[type, ...], str]] = {
        **dict.fromkeys(_SPECIAL_KEYS, ((str, dict), "a token, as text or as an object")),
        "additional_special_tokens": ((list,), "a list of tokens"),
        "extra_special_tokens": ((list, dict), "a list of tokens, or an object of them"),
        "chat_template": ((str, list, dict), "text, or a list of named templates"),
    }
    for key, (types, what) in kinds.items():
        value = settings.get(key)
        if value is not None and not isinstance(value, types):
            raise WeightsError(f"{file}: {key} must be {what}, not {shown(value)}")


def _token_text(value: Any) -> str | None:
    """A token is written as text or as an object with its content."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) and value else None


def _named_specials(settings: dict[str, Any]) -> dict[str, str]:
    texts = {key: _token_text(settings.get(key)) for key in _SPECIAL_KEYS}
    return {key: text for key, text in texts.items() if text is not None}


def _add_missing(
    backend: tokenizers.Tokenizer, specials: dict[str, str], settings: dict[str, Any]
) -> None:
    """Special tokens that are only in the settings."""
    extra = settings.get("additional_special_tokens") or settings.get("extra_special_tokens") or []
    texts = [*specials.values(), *(_token_text(item) or "" for item in _listed(extra))]
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [text for text in dict.fromkeys(texts) if text and text not in known]
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in missing])


def _listed(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _template_in(path: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja, chat_template.json, or the settings (one text or several by name)."""
    file = path / "chat_template.jinja"
    if file.exists():
        raw = file.read_bytes()
        try:
            if len(raw) <= _MAX_TEMPLATE_BYTES:
                return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise WeightsError(f"{file}: not UTF-8. Fetch it again.") from error
        raise WeightsError(f"{file}: {len(raw)} bytes is too large. Fetch it again.")
    beside = _optional(path / "chat_template.json").get("chat_template")
    template = settings.get("chat_template") if beside is None else beside
    if isinstance(template, list):
        named = [item for item in template if isinstance(item, dict)]
        template = {item.get("name"): item.get("template") for item in named}.get("default")
    return template if isinstance(template, str) else None


def _eos_in(path: Path) -> tuple[int, ...]:
    """generation_config.json, else config.json: transformers stops at these."""
    for file in ("generation_config.json", "config.json"):
        value = _optional(path / file).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if value is not None and all(type(item) is int for item in ids):
            return tuple(ids)
    return ()


def _byte_alphabet() -> dict[int, str]:
    """Byte-level BPE writes each byte as one printable character: GPT-2's table, reversed. The byte
    as a character of latin-1, and one that is not in latin-1 for the others below 256."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    table = dict.fromkeys(rest, "\u0100") | {byte: chr(byte) for byte in plain}
    table.update({256 + position: chr(byte) for position, byte in enumerate(rest)})
    return table


_BYTE_OF = _byte_alphabet()


# normalizers that do not change the number of ASCII characters
_KEEPING = frozenset({"Prepend", "ByteLevel", "Lowercase"})
# these join a letter and the combining mark after it
_COMPOSING = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
_SPLITTERS = frozenset({"ByteLevel", "Digits", "Metaspace"})
_WORD = (string.ascii_letters + string.digits).encode()
_NO_WORD = bytes(byte for byte in range(256) if byte not in _WORD)
# a vocabulary may not have some of these, and then they are dropped
_CONTROL = bytes((*range(32), 127))


@dataclass(frozen=True, slots=True)
class TokenBound:
    """The most printable ASCII characters, and the most letters and digits, of one token. Runs of
    spaces and dashes make the first several times the second."""

    characters: int
    word_characters: int
    # nothing is known about a text with other characters
    only_ascii: bool

    def least_tokens(self, text: str) -> int:
        if self.only_ascii and not text.isascii():
            return 0
        plain = text.encode("ascii", "ignore").translate(None, _CONTROL)
        words = plain.translate(None, _NO_WORD)
        return max(len(plain) // self.characters, len(words) // self.word_characters)


def token_bound(backend: tokenizers.Tokenizer) -> TokenBound | None:
    kinds = _normalizers(_settings_of(backend.normalizer))
    if kinds is None or not _keeps(_settings_of(backend.pre_tokenizer)) or backend.truncation:
        return None
    # those also take any number of spaces
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None
    vocab = backend.get_vocab(with_added_tokens=True)
    if not _knows_ascii(backend.model, vocab):
        return None
    characters = max(map(len, vocab))
    words = max(len(token.encode("ascii", "ignore").translate(None, _NO_WORD)) for token in vocab)
    return TokenBound(characters, max(words, 1), bool(kinds & _COMPOSING))


def _settings_of(part: Any) -> Any:
    """A normalizer or splitter as in a tokenizer.json: of the part alone, since the whole file has
    the vocabulary too."""
    return None if part is None else json.loads(part.__getstate__())


def _knows_ascii(model: tokenizers.models.Model, vocab: Mapping[str, int]) -> bool:
    """If not, a run of unknown characters may become one token, or none."""
    if not isinstance(model, tokenizers.models.BPE):
        return False
    if model.byte_fallback and all(f"<0x{code:02X}>" in vocab for code in range(128)):
        return True
    return all(chr(code) in vocab for code in range(33, 127)) and ("Ġ" in vocab or "▁" in vocab)


def _normalizers(given: Any) -> set[str] | None:
    """Their kinds; None where one may drop characters."""
    if given is None:
        return set()
    kind: str = given["type"]
    if kind == "Sequence":
        found: set[str] = set()
        for part in given["normalizers"]:
            kinds = _normalizers(part)
            if kinds is None:
                return None
            found |= kinds
        return found
    if kind == "Replace":
        pattern = given["pattern"].get("String")
        return None if pattern is None or len(given["content"]) < len(pattern) else {kind}
    return {kind} if kind in _KEEPING | _COMPOSING else None


def _keeps(splitter: Any) -> bool:
    if splitter is None or splitter["type"] in _SPLITTERS:
        return True
    if splitter["type"] == "Sequence":
        return all(_keeps(part) for part in splitter["pretokenizers"])
    return bool(splitter["type"] == "Split") and splitter["behavior"] != "Removed"
