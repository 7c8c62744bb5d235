"""Local TLS relay: accepts plaintext connections on 127.0.0.1 and forwards them to a server over TLS.

The relay applies the user's certificate policy. Libraries such as FFmpeg cannot apply it themselves.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from saccade.sources.errors import SourceError
from saccade.sources.network.stream_socket import WAKE_S, StreamSocket, wait_for

_READ = 64 << 10
_STUCK_S = 10.0  # seconds for the library to read the data that has arrived


class Relay:
    """Local server on 127.0.0.1 that forwards connections to a remote server.

    The constructor opens the first connection to the remote server.

    Attributes:
        port: port on 127.0.0.1.

    Args:
        connect: opens a connection to the remote server.

    Raises:
        LiveError, SourceError: if `connect` fails.
    """

    def __init__(self, connect: Callable[[], StreamSocket]) -> None:
        self._connect = connect
        self._first: StreamSocket | None = connect()
        self._closed = threading.Event()
        try:
            self._listener = socket.create_server(("127.0.0.1", 0))
        except BaseException:
            self._first.close()
            raise
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, name="saccade relay", daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """Close all relayed connections and stop listening."""
        self._closed.set()
        for thread in list(self._threads):
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        with self._listener:
            while not self._closed.is_set():
                if wait_for([self._listener.fileno()], WAKE_S):
                    local, _ = self._listener.accept()
                    thread = threading.Thread(target=self._carry, args=(local,), name="saccade relay", daemon=True)
                    self._threads.append(thread)
                    thread.start()
        if self._first is not None:
            self._first.close()

    def _carry(self, local: socket.socket) -> None:
        """Forward a local connection to the server until one of them closes it."""
        with local, suppress(SourceError, OSError):  # the library sees an error as the end of its connection
            server, self._first = self._first or self._connect(), None
            try:
                local.settimeout(_STUCK_S)
                while not self._closed.is_set():
                    both = [server.fileno(), local.fileno()]
                    ready = both[:1] if server.pending else wait_for(both, WAKE_S)
                    if both[0] in ready:
                        local.sendall(server.receive())
                    if both[1] in ready:
                        if not (data := local.recv(_READ)):
                            return
                        server.send(data)
            finally:
                server.close()
