"""`coterie client-config`: the settings that connect a program of others to a running server."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from coterie.cli.admin_client import fetched
from coterie.cli.terminal import note
from coterie.core.errors import ConfigError

HELP = "print the settings that connect a client to a running server"
EPILOG = """\
examples:
  eval "$(coterie client-config claude-code)" && claude
  coterie client-config codex > ~/.codex/config.toml
  coterie client-config opencode --model auto > opencode.json
  coterie client-config continue --url http://gpu-box:8000 --key-env COTERIE_KEY
  coterie client-config openwebui

The server is asked for its models, so that the client is told the context it
has. A warning on stderr says if that is too small for the client's own prompt.
A key is never printed: the settings name the variable of --key-env.
docs/clients.md says more about each client.
"""
URL = "http://127.0.0.1:8000"
AUTO = "auto"
# of the context, for the answer
_ANSWER_SHARE, _MAX_ANSWER = 4, 32_000
_MAX_NAME = 512
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class ClientSetup:
    """What a client has to know."""

    url: str
    model: str
    # tokens of prompt and answer together
    context: int
    # "" = the server has no keys
    key_env: str = ""

    @property
    def output(self) -> int:
        """Tokens of an answer that leave room for a prompt."""
        return max(min(self.context // _ANSWER_SHARE, _MAX_ANSWER), 1)

    @property
    def shell_key(self) -> str:
        return f'"${self.key_env}"' if self.key_env else "none"


@dataclass(frozen=True, slots=True)
class SupportedClient:
    """`text` writes the settings. `needs`: tokens of context that it needs to be useful, with its
    own prompt; `place`: where the text belongs, empty = it is lines for a shell."""

    text: Callable[[ClientSetup], str]
    needs: int
    place: str = ""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("client", metavar="CLIENT", choices=CLIENTS, help=", ".join(CLIENTS))
    parser.add_argument("--url", default=URL, metavar="URL", help="the server")
    parser.add_argument("--model", metavar="NAME", help="(default: auto, or the only model)")
    parser.add_argument("--key-env", default="", metavar="NAME", help="variable with the API key")


def execute(args: argparse.Namespace) -> int:
    client = CLIENTS[args.client]
    setup = setup_of(args)
    if client.place:
        note(f"for {client.place}:")
    if setup.context < client.needs:
        note(
            f"warning: {setup.model} has a context of {setup.context} tokens here; {args.client} "
            f"needs about {client.needs} with its own prompt. Serve a model with more, or use "
            "another client."
        )
    print(client.text(setup).rstrip())
    return 0


def setup_of(args: argparse.Namespace) -> ClientSetup:
    url = _base_url(args.url)
    if args.model is not None and not (args.model and args.model.isprintable()):
        raise ConfigError("--model is the name of a model", param="model")
    if args.key_env and not _VARIABLE.fullmatch(args.key_env):
        raise ConfigError("--key-env is the name of a variable, not the key", param="key_env")
    key = os.environ.get(args.key_env, "") if args.key_env else ""
    if args.key_env and not key:
        raise ConfigError(f"the variable {args.key_env} is not set", param="key_env")
    answer = fetched(url, "/v1/models", key)
    cards = answer.get("data") if isinstance(answer, dict) else None
    listed = [_card(card, url) for card in cards] if isinstance(cards, list) else []
    models = [card for card in listed if not card.is_encoder]
    if not models:
        raise ConfigError(f"{url} serves no model that writes text", param="url")
    name = args.model or _default(models)
    if any(card.name == name for card in listed if card.is_encoder):
        raise ConfigError(f"{name} is an encoder and writes no text", param="model")
    context = _context(models, name)
    if context is None:
        # a name that is not listed: an alias with a wildcard, or several experts
        context = _card(fetched(url, f"/v1/models/{quote(name)}", key), url).context
    return ClientSetup(url, name, context, args.key_env)


@dataclass(frozen=True, slots=True)
class ListedModel:
    """One model of the server's list."""

    name: str
    context: int
    is_encoder: bool


def _card(card: Any, url: str) -> ListedModel:
    """Refuses what could be more than a name: the settings are read by a shell."""
    found = card if isinstance(card, dict) else {}
    name, context = found.get("id"), found.get("max_model_len")
    is_good = isinstance(name, str) and name.isprintable() and 0 < len(name) <= _MAX_NAME
    if not is_good or type(context) is not int or context < 1:
        raise ConfigError(f"{url} does not list its models as Coterie does", param="url")
    return ListedModel(str(name), context, found.get("kind") == "encoder")


def _base_url(text: str) -> str:
    """Without /v1, which some clients want and others do not."""
    url = text.rstrip("/").removesuffix("/v1").rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
        raise ConfigError(f"--url: write a URL such as {URL}, without a key", param="url")
    return url


def _default(models: Sequence[ListedModel]) -> str:
    names = [model.name for model in models]
    return AUTO if AUTO in names else names[0]


def _context(models: Sequence[ListedModel], name: str) -> int | None:
    """Of the model; for `auto` the smallest, because any may answer."""
    found = [model.context for model in models if name in (model.name, AUTO)]
    return min(found) if any(model.name == name for model in models) else None


def _exports(values: Mapping[str, str | int]) -> str:
    return "\n".join(f"export {name}={value}" for name, value in values.items())


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _claude_code(setup: ClientSetup) -> str:
    name = shlex.quote(setup.model)
    return _exports(
        {
            "ANTHROPIC_BASE_URL": shlex.quote(setup.url),
            "ANTHROPIC_AUTH_TOKEN": setup.shell_key,
            "ANTHROPIC_MODEL": name,
            # for small tasks, and for what subagents ask for by name
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": name,
            "ANTHROPIC_DEFAULT_SONNET_MODEL": name,
            "ANTHROPIC_DEFAULT_OPUS_MODEL": name,
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": setup.output,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": 1,
        }
    )


def _codex(setup: ClientSetup) -> str:
    # a JSON string is a TOML string
    lines = [
        f"model = {json.dumps(setup.model)}",
        'model_provider = "coterie"',
        f"model_context_window = {setup.context}",
        "",
        "[model_providers.coterie]",
        'name = "Coterie"',
        f"base_url = {json.dumps(setup.url + '/v1')}",
        'wire_api = "responses"',
    ]
    return "\n".join([*lines, f"env_key = {json.dumps(setup.key_env)}"] if setup.key_env else lines)


def _aider(setup: ClientSetup) -> str:
    name = f"openai/{setup.model}"
    limits = {
        "max_tokens": setup.output,
        "max_input_tokens": setup.context - setup.output,
        "max_output_tokens": setup.output,
        "litellm_provider": "openai",
        "mode": "chat",
    }
    exports: dict[str, str | int] = {
        "OPENAI_API_BASE": shlex.quote(setup.url + "/v1"),
        "OPENAI_API_KEY": setup.shell_key,
    }
    return "\n".join(
        [
            _exports(exports),
            "cat > .aider.model.metadata.json <<'END'",
            _json({name: limits}),
            "END",
            f"aider --model {shlex.quote(name)} --weak-model {shlex.quote(name)}",
        ]
    )


def _opencode(setup: ClientSetup) -> str:
    key = f"{{env:{setup.key_env}}}" if setup.key_env else "none"
    name = f"coterie/{setup.model}"
    limit = {"context": setup.context, "output": setup.output}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Coterie",
        "options": {"baseURL": setup.url + "/v1", "apiKey": key},
        "models": {setup.model: {"limit": limit}},
    }
    return _json(
        {
            "$schema": "https://opencode.ai/config.json",
            "model": name,
            "small_model": name,
            "provider": {"coterie": provider},
        }
    )


def _continue(setup: ClientSetup) -> str:
    # a JSON string is a YAML string
    key = f"${{{{ secrets.{setup.key_env} }}}}" if setup.key_env else "none"
    lines = [
        "name: Coterie",
        "version: 1.0.0",
        "schema: v1",
        "models:",
        "  - name: Coterie",
        "    provider: openai",
        f"    model: {json.dumps(setup.model)}",
        f"    apiBase: {json.dumps(setup.url + '/v1')}",
        f"    apiKey: {json.dumps(key)}",
        "    roles: [chat, edit, apply, summarize]",
        "    capabilities: [tool_use]",
        "    defaultCompletionOptions:",
        f"      contextLength: {setup.context}",
        f"      maxTokens: {setup.output}",
    ]
    return "\n".join(lines)


def _zed(setup: ClientSetup) -> str:
    """Zed reads the key from COTERIE_API_KEY."""
    model = {
        "name": setup.model,
        "max_tokens": setup.context,
        "max_output_tokens": setup.output,
        "capabilities": {
            "tools": True,
            "images": False,
            "parallel_tool_calls": True,
            "prompt_cache_key": True,
        },
    }
    provider = {"api_url": setup.url + "/v1", "available_models": [model]}
    return _json(
        {
            "language_models": {"openai_compatible": {"Coterie": provider}},
            "agent": {"default_model": {"provider": "Coterie", "model": setup.model}},
        }
    )


def _openwebui(setup: ClientSetup) -> str:
    """With Ollama's API, for which it takes no key from a variable."""
    if not setup.key_env:
        return _exports(
            {
                "ENABLE_OLLAMA_API": "true",
                "OLLAMA_BASE_URL": shlex.quote(setup.url),
                "ENABLE_OPENAI_API": "false",
                "DEFAULT_MODELS": shlex.quote(_tagged(setup.model)),
            }
        )
    return _exports(
        {
            "ENABLE_OPENAI_API": "true",
            "OPENAI_API_BASE_URL": shlex.quote(setup.url + "/v1"),
            "OPENAI_API_KEY": setup.shell_key,
            "ENABLE_OLLAMA_API": "false",
            "DEFAULT_MODELS": shlex.quote(setup.model),
        }
    )


def _ollama(setup: ClientSetup) -> str:
    values: dict[str, str | int] = {"OLLAMA_HOST": shlex.quote(setup.url)}
    if setup.key_env:
        values["OLLAMA_API_KEY"] = setup.shell_key
    return _exports(values) + f"\n# the model is {_tagged(setup.model)}"


def _tagged(name: str) -> str:
    """As Ollama's lists write it."""
    return name if ":" in name else f"{name}:latest"


CLIENTS: dict[str, SupportedClient] = {
    "claude-code": SupportedClient(_claude_code, 64_000),
    "codex": SupportedClient(_codex, 32_000, "~/.codex/config.toml"),
    "aider": SupportedClient(_aider, 8_000),
    "opencode": SupportedClient(_opencode, 32_000, "opencode.json in the project"),
    "continue": SupportedClient(_continue, 8_000, "~/.continue/config.yaml"),
    "zed": SupportedClient(_zed, 32_000, "Zed's settings.json; a key is read from COTERIE_API_KEY"),
    "openwebui": SupportedClient(_openwebui, 4_000),
    "ollama": SupportedClient(_ollama, 2_000),
}
