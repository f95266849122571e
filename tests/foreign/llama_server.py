"""Called as llama-server by llama.cpp's tests: lends them a Coterie server with the same meaning.

Each of their tests starts one, nearly all with the same settings. So the server itself outlives
its caller and is lent to the next, until one asks for other settings or the suite has ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.foreign.server import Server, arguments


def main() -> None:
    given = sys.argv[1:]
    at = given.index("--port")
    port = int(given[at + 1])
    lent = _lend([*given[:at], *given[at + 2 :]], Path(os.environ["FOREIGN_LENT"]))
    asyncio.run(_relay(port, lent))


def _lend(given: list[str], note: Path) -> int:
    """The port of a server with these settings, as far as they mean something here."""
    key = given[given.index("--api-key") + 1] if "--api-key" in given else None
    wanted = [*arguments(given), key]
    if note.is_file():
        told = json.loads(note.read_text())
        if told["wanted"] == wanted:
            return int(told["port"])
        end(note)
    server = Server("test", given, key)
    port = urlsplit(server.url).port or 0
    note.write_text(json.dumps({"wanted": wanted, "port": port, "pid": server.process.pid}))
    return port


def end(note: Path) -> None:
    """Of the server that is lent, if any."""
    if note.is_file():
        os.kill(json.loads(note.read_text())["pid"], signal.SIGTERM)
        note.unlink()


async def _relay(port: int, lent: int) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", lent)
        # whoever hangs up first: the other side is told
        copies = [
            asyncio.create_task(_copy(reader, back)),
            asyncio.create_task(_copy(there, writer)),
        ]
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        for side in (back, writer):
            side.close()
        await asyncio.gather(*copies, return_exceptions=True)

    async with await asyncio.start_server(connected, "127.0.0.1", port) as relay:
        await relay.serve_forever()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(65536):
        writer.write(piece)
        await writer.drain()


if __name__ == "__main__":
    main()
