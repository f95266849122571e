"""`coterie serve`: the HTTP server, from settings to a drained shutdown."""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from coterie.api.auth import check_exposure, load_keys
from coterie.cli.better import add_yes, offer_better, take_better
from coterie.cli.machine import is_installed
from coterie.cli.options import add_capture, add_model, add_moe, count, fetch, moe_options, size
from coterie.cli.specialist import index_of
from coterie.cli.terminal import note
from coterie.core import spawn
from coterie.core.config import LOG_LEVELS, Config, ServerSettings, SpecialistSettings, load
from coterie.core.encoders import ENCODER, STATIC
from coterie.core.errors import ConfigError, MissingDependency
from coterie.workers import early
from coterie.workers.memory import cores

HELP = "serve models over HTTP: OpenAI, Anthropic and native APIs"
EPILOG = """\
examples:
  coterie serve                              on http://127.0.0.1:8000
  coterie serve qwen3:4b                     a model by its short name
  coterie serve --yes                        the best model that fits
  coterie serve ./my-model --dtype int8 --port 9000
  coterie serve --host 0.0.0.0 --api-key-file keys.txt
  coterie serve --tls-cert cert.pem --tls-key key.pem
  coterie serve --admin-key-file admins.txt  install experts over HTTP
  coterie serve --encoder static             with embeddings, by a shipped table
  coterie serve --config coterie.toml        docs/config.md lists every key

Ctrl-C lets running requests end; a second Ctrl-C stops at once.
"""

# option -> setting
_SETTINGS = {
    "host": "server.host",
    "port": "server.port",
    "api_key_file": "server.api_key_file",
    "admin_key_file": "server.admin_key_file",
    "tls_cert": "server.tls_cert",
    "tls_key": "server.tls_key",
    "allow_unsigned": "server.allow_unsigned",
    "insecure": "server.insecure",
    "allowed_hosts": "server.allowed_hosts",
    "cors_origins": "server.cors_origins",
    "max_connections_per_address": "server.max_connections_per_address",
    "clamp_max_tokens": "server.clamp_max_tokens",
    "user_rate": "server.user_rate",
    "grpc_port": "server.grpc_port",
    "log_level": "server.log_level",
    "device": "engine.device",
    "threads": "engine.threads",
    "kv_bytes": "engine.kv_bytes",
    "capture_graphs": "engine.capture_graphs",
    "kv_cache_slots": "engine.kv_cache_slots",
    "max_queue": "engine.max_queue",
    "max_sequences": "engine.max_sequences",
    "adapter_bytes": "adapters.device_bytes",
    "otlp_traces_endpoint": "tracing.endpoint",
    "model": "specialists.0.model",
    "name": "specialists.0.name",
    "dtype": "specialists.0.dtype",
    "context": "specialists.0.context",
    "replicas": "specialists.0.replicas",
}


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_capture(parser)
    add_yes(parser)
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML settings")
    parser.add_argument(
        "--specialist",
        metavar="NAME",
        help="of --config: the one that MODEL, --dtype, --context ... are for (default: the first)",
    )
    parser.add_argument("--host", help="address to bind (default: 127.0.0.1)")
    parser.add_argument("--port", type=port, help="port; 0 = any free one (default: 8000)")
    _add_access(parser)
    parser.add_argument(
        "--clamp-max-tokens",
        action="store_true",
        default=None,
        help="shorten a max_tokens that is beyond the context instead of refusing the request",
    )
    parser.add_argument(
        "--user-rate",
        type=float,
        metavar="N",
        help="requests per second and user_id (default: any)",
    )
    parser.add_argument(
        "--grpc-port", type=port, metavar="PORT", help="gRPC too; 0 = any free port (default: none)"
    )
    parser.add_argument(
        "--encoder",
        action="append",
        metavar="MODEL",
        help="embeddings too: a directory, pypi:, hf:, or `static`, the shipped table",
    )
    parser.add_argument("--name", help="the model's name for clients (default: from its file)")
    parser.add_argument("--replicas", type=count, metavar="N", help="worker processes (default: 1)")
    parser.add_argument(
        "--kv-cache-slots",
        type=int,
        metavar="N",
        help="conversations whose KV is kept longest (default: 16)",
    )
    parser.add_argument("--max-queue", type=count, metavar="N", help="waiting requests before 429")
    parser.add_argument("--max-sequences", type=count, metavar="N", help="sequences run together")
    parser.add_argument(
        "--log-level",
        choices=LOG_LEVELS,
        metavar="LEVEL",
        help=f"{', '.join(LOG_LEVELS)} (default: info)",
    )
    parser.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="where traces of requests are sent, such as http://localhost:4318 (default: none)",
    )
    _add_adapters(parser)
    add_moe(parser)


def _add_access(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="one API key per line; KEY priority=9 max_running=8 gives it rights",
    )
    parser.add_argument(
        "--tls-cert",
        metavar="FILE",
        help="serve over TLS with this certificate (PEM); a renewed file is read by itself",
    )
    parser.add_argument(
        "--tls-key", metavar="FILE", help="its private key (default: in the certificate's file)"
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        default=None,
        help="allow a public address without API keys",
    )
    parser.add_argument(
        "--allowed-hosts",
        type=listed,
        metavar="NAME,...",
        help="host names that requests may be sent to, * = any (default: without keys addresses, "
        "localhost and --host; with keys any)",
    )
    parser.add_argument(
        "--cors-origins",
        type=listed,
        metavar="ORIGIN,...",
        help="origins whose web pages may call, * = any (default: none but this server's own)",
    )
    parser.add_argument(
        "--max-connections-per-address",
        type=count,
        metavar="N",
        help="open connections of one address (default: 512)",
    )


def _add_adapters(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("experts that are adapters (LoRA, DoRA, IA3, soft prompts)")
    add.add_argument(
        "--adapter-bytes", type=size, metavar="SIZE", help="room where the model runs; 0 = none"
    )
    add.add_argument(
        "--admin-key-file", metavar="FILE", help="keys that may install and remove experts"
    )
    add.add_argument(
        "--allow-unsigned",
        action="store_true",
        default=None,
        help="let admins load adapters that nobody signed (logged)",
    )


def listed(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (0 to 65535)")
    return int(text)


def settings(args: argparse.Namespace) -> Config:
    """The settings of the file and the flags. Reads the file each time."""
    place = _place(args)
    overrides = {
        key.replace("specialists.0.", f"specialists.{place}."): getattr(args, option)
        for option, key in _SETTINGS.items()
    }
    for name, value in moe_options(args).items():
        overrides[f"specialists.{place}.moe.{name}"] = value
    config = load(args.config, overrides)
    added = tuple(SpecialistSettings(ENCODER, model=model) for model in args.encoder or ())
    return replace(config, encoders=config.encoders + added) if added else config


def _place(args: argparse.Namespace) -> int:
    """The specialist that MODEL, --dtype, --context ... mean."""
    if args.specialist is None:
        return 0
    if args.config is None:
        raise ConfigError("--specialist needs --config FILE", param="specialist")
    return index_of([item.name for item in load(args.config).specialists], args.specialist)


def execute(args: argparse.Namespace) -> int:
    # before any native library is loaded
    spawn.pin_native_threads()
    take_better(args)
    config = settings(args)
    for name in ("fastapi", "uvicorn", "msgspec", "zmq"):
        if not is_installed(name):
            package = "pyzmq" if name == "zmq" else name
            raise MissingDependency(f"serving needs {package}: pip install {package}")
    if config.server.grpc_port >= 0 and not is_installed("grpc_reflection"):
        raise MissingDependency("--grpc-port needs grpcio: pip install 'coterie[grpc]'")
    from coterie.core.private_files import private_folder
    from coterie.weights.home import state_dir

    # a server without its state would lose jobs, batches and receipts
    private_folder(state_dir() / "run")
    private_folder(state_dir())
    listener = listen(config.server)
    local = [specialist for specialist in config.specialists if not specialist.remote.url]
    # of several specialists it is not known yet how many engines share the cores
    if len(local) == 1 and local[0].replicas == 1:
        early.begin(config.engine.threads or cores())
    offer_better(args, "serve", note)
    try:
        _run(config, listener, args)
    finally:
        early.discard()
    return 0


def _run(config: Config, listener: socket.socket, args: argparse.Namespace) -> None:
    from coterie.service.config_check import check, expected_names

    # what is wrong is said before anything is fetched
    check(config, expected_names(config))
    for specialist in config.specialists:
        if not specialist.remote.url:
            fetch(specialist.model or None)
    for encoder in config.encoders:
        if encoder.model != STATIC:
            fetch(encoder.model)
    from coterie.obs.log import configure as configure_log

    configure_log(config.server.log_level)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(config, listener, lambda: settings(args)))


async def _serve(config: Config, listener: socket.socket, read: Callable[[], Config]) -> None:
    # what an import makes stays to the end: looking for garbage in it takes a tenth of the start
    gc.disable()
    from coterie.obs.loop_watch import LoopWatch
    from coterie.service.build import build

    pipeline = build(config)
    with LoopWatch(pipeline.registry):
        # the workers load their models while this process imports the web framework
        starting = asyncio.ensure_future(pipeline.start())
        server = await asyncio.to_thread(importlib.import_module, "coterie.cli.server")
        gc.freeze()
        gc.enable()
        await server.run(config, pipeline, starting, listener, read)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def listen(server: ServerSettings) -> socket.socket:
    """The listening socket: a port in use, an unprotected address or a certificate that cannot be
    used is reported before a model loads."""
    from coterie.api.transport.tls import certificate_of

    keys = load_keys(server)
    check_exposure(server.host, keys.callers is not None, server.insecure)
    certificate_of(server)
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    try:
        return socket.create_server((server.host, server.port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {server.host}:{server.port}: {error.strerror or error}; "
            "choose another --port (0 = any free one)",
            param="server.port",
        ) from error
