"""The connection of a WebSocket: how many frames a message may have, and how many pings."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame

from coterie.api.body import receiving
from coterie.api.transport.connections import LINGER_S, WatchedProtocol
from coterie.core.errors import Overloaded

# a message of the largest size may come in pieces of a kilobyte
MAX_FRAGMENTS = 4096
# pings and pongs of one second; clients send one in several seconds
MAX_CONTROL_FRAMES, CONTROL_WINDOW_S = 128, 1.0
# bytes of a frame that the parser gets at once
FRAME_PIECE = 65_536
# bytes of a frame's header, with its mask, by the length that its second byte says
_SHORT, _LONG, _LONGEST = 6, 8, 14


class SocketConnection(WatchedProtocol, WebSocketsSansIOProtocol):
    """A WebSocket. It has a deadline until it is accepted; then pings detect a lost peer. The
    parser gets one frame at a time, and none while a message waits for the application or pongs
    wait for the client."""

    # bytes of the current frame that are still to be parsed
    _frame_left = 0
    _held_bytes = 0
    _control_frames = 0
    _control_since = 0.0
    # its code has been sent; what still arrives is dropped
    _is_refused = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watched = self.watching.handed_over.pop(transport, None)
        if self._watched is not None:
            self.address = self._watched.address

    def connection_lost(self, exc: Exception | None) -> None:
        receiving.num_bytes -= self._held_bytes
        self._held_bytes = 0
        super().connection_lost(exc)

    def start_keepalive(self) -> None:
        """uvicorn calls it when the handshake has ended."""
        if self._watched is not None:
            self._watched.deadline = None
        super().start_keepalive()
        self.parse_soon()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self.handshake_initiated:
            super().data_received(data)
        else:
            # the request, as the HTTP connection has read it
            self._feed(data)

    async def receive(self) -> Any:
        message = await super().receive()
        # uvicorn resumes reading, however much waits to be parsed
        self._limit_reading()
        self.parse_soon()
        return message

    def _may_parse(self) -> bool:
        if self.transport.is_closing() or self._is_refused:
            return False
        return self.handshake_complete and not self.read_paused and self.writable.is_set()

    def _piece_size(self) -> int:
        if not self._frame_left:
            self._frame_left = _frame_size(self._unread)
        return min(self._frame_left, FRAME_PIECE)

    def _feed(self, piece: bytes) -> None:
        self._frame_left = max(0, self._frame_left - len(piece))
        WebSocketsSansIOProtocol.data_received(self, piece)
        if not self._is_refused:
            self._count_held(len(self.conn.reader.buffer) + (self.conn.current_size or 0))

    def _count_held(self, num_bytes: int) -> None:
        """Bytes of a message that has not arrived completely count as a body that is received."""
        if num_bytes == self._held_bytes:
            return
        try:
            receiving.add(num_bytes - self._held_bytes, self.watching.settings.max_body_bytes)
            self._held_bytes = num_bytes
        except Overloaded as error:
            self._refuse(CloseCode.TRY_AGAIN_LATER, "large_messages", error.message)

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) < MAX_FRAGMENTS:
            super().handle_cont(event)
        else:
            reason = f"a message may have {MAX_FRAGMENTS} fragments"
            self._refuse(CloseCode.MESSAGE_TOO_BIG, "fragments", reason)

    def handle_ping(self) -> None:
        if self._may_take_control_frame():
            super().handle_ping()

    def handle_pong(self, event: Frame) -> None:
        if self._may_take_control_frame():
            super().handle_pong(event)

    def _may_take_control_frame(self) -> bool:
        now = self.loop.time()
        if now - self._control_since > CONTROL_WINDOW_S:
            self._control_since, self._control_frames = now, 0
        self._control_frames += 1
        if self._control_frames <= MAX_CONTROL_FRAMES:
            return True
        reason = f"at most {MAX_CONTROL_FRAMES} pings and pongs a second"
        self._refuse(CloseCode.POLICY_VIOLATION, "control_frames", reason)
        return False

    def _refuse(self, code: CloseCode, reason: str, message: str) -> None:
        """Close with this code; the client gets LINGER_S to read it."""
        if self.transport.is_closing() or self._is_refused:
            return
        if self._watched is not None:
            self.watching.ended(reason, self._watched.address)
        self.conn.fail(code, message)
        self.handle_parser_exception()

    def handle_parser_exception(self) -> None:
        """Send the code and end this side. What arrives then is read and dropped, until the client
        ends its side: closing at once resets the connection of a client that sends, which may not
        get the code then."""
        closed = self.conn.close_sent
        assert closed is not None
        self.queue.put_nowait(
            {"type": "websocket.disconnect", "code": closed.code, "reason": closed.reason}
        )
        self.transport.write(b"".join(self.conn.data_to_send()))
        # the application can send nothing more
        self.close_sent = self.disconnected = self._is_refused = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._drop_unread()
        self.close_timer = self.loop.call_later(LINGER_S, self.transport.close)
        self._wait(LINGER_S, "idle")

    def _drop_unread(self) -> None:
        self._unread.clear()
        self.conn.reader.discard()
        self.frames = []
        receiving.num_bytes -= self._held_bytes
        self._held_bytes = 0
        self._limit_reading()

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        super().on_task_complete(task)
        if not self._is_refused:
            # the client's part of the closing handshake; what it does not read is not waited for
            self._wait(self.close_timeout + LINGER_S, "idle")


def _frame_size(unread: bytearray) -> int:
    """Size of the frame that begins here; 0 if its header has not arrived. The parser checks the
    header: a frame without a mask, or a larger one than is allowed, ends the connection."""
    if len(unread) < 2:
        return 0
    length = unread[1] & 0x7F
    if length < 126:
        return _SHORT + length
    header = _LONG if length == 126 else _LONGEST
    if len(unread) < header - 4:
        return 0
    return header + int.from_bytes(unread[2 : header - 4])
