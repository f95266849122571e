"""`coterie serve`: the HTTP server, from settings to a drained shutdown."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from coterie.cli.options import add_model, count, fetch
from coterie.core.config import LOG_LEVELS, Config, load
from coterie.core.errors import MissingDependency

HELP = "serve models over HTTP: OpenAI, Anthropic and native APIs"
EPILOG = """\
examples:
  coterie serve                                  the default model on http://127.0.0.1:8000
  coterie serve ./my-model --dtype int8 --port 9000
  coterie serve --host 0.0.0.0 --api-key-file keys.txt
  coterie serve --config coterie.toml            docs/config.md lists every key

Ctrl-C lets running requests end; a second Ctrl-C stops at once.
"""

# option -> setting
_SETTINGS = {
    "host": "server.host",
    "port": "server.port",
    "api_key_file": "server.api_key_file",
    "insecure": "server.insecure",
    "log_level": "server.log_level",
    "device": "engine.device",
    "threads": "engine.threads",
    "kv_bytes": "engine.kv_bytes",
    "max_queue": "engine.max_queue",
    "max_sequences": "engine.max_sequences",
    "model": "specialists.0.model",
    "name": "specialists.0.name",
    "dtype": "specialists.0.dtype",
    "context": "specialists.0.context",
    "replicas": "specialists.0.replicas",
}


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML settings")
    parser.add_argument("--host", help="address to bind (default: 127.0.0.1)")
    parser.add_argument("--port", type=port, help="port; 0 = any free one (default: 8000)")
    parser.add_argument("--api-key-file", metavar="FILE", help="one API key per line")
    parser.add_argument(
        "--insecure",
        action="store_true",
        default=None,
        help="allow a public address without API keys",
    )
    parser.add_argument("--name", help="the model's name for clients (default: from its file)")
    parser.add_argument("--context", type=count, metavar="N", help="tokens of prompt plus output")
    parser.add_argument("--replicas", type=count, metavar="N", help="worker processes (default: 1)")
    parser.add_argument("--max-queue", type=count, metavar="N", help="waiting requests before 429")
    parser.add_argument("--max-sequences", type=count, metavar="N", help="sequences run together")
    parser.add_argument("--log-level", choices=LOG_LEVELS, help="default: info")


def port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (0 to 65535)")
    return int(text)


def settings(args: argparse.Namespace) -> Config:
    overrides = {key: getattr(args, option) for option, key in _SETTINGS.items()}
    return load(args.config, overrides)


def execute(args: argparse.Namespace) -> int:
    config = settings(args)
    for name in ("fastapi", "uvicorn", "msgspec", "zmq"):
        if importlib.util.find_spec(name) is None:
            package = "pyzmq" if name == "zmq" else name
            raise MissingDependency(f"serving needs {package}: pip install {package}")
    from coterie.cli.server import listen, serve
    from coterie.obs.trace import configure as configure_log

    listener = listen(config.server)
    for specialist in config.specialists:
        fetch(specialist.model or None)
    configure_log(config.server.log_level)
    serve(config, listener)
    return 0
