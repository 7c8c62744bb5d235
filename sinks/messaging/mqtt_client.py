"""aiomqtt's client, without a race that keeps its event loop from ever connecting again. Knows no topics."""

from __future__ import annotations

from typing import Any

import aiomqtt


class MqttClient(aiomqtt.Client):
    """See `aiomqtt.Client`.

    There a socket is registered with the event loop some time after paho asked for it. Where the connection breaks in
    between, and another thread is given the same file descriptor at once, the loop takes that one for the socket, and
    keeps it when it is closed: no later socket of that number can be registered, and no answer of the broker is read.
    """

    def _on_socket_open(self, client: Any, userdata: Any, sock: Any) -> None:
        number = sock.fileno()
        super()._on_socket_open(client, userdata, sock)
        self._loop.call_soon_threadsafe(self._forget_if_closed, sock, number)  # runs right behind the registration

    def _on_socket_register_write(self, client: Any, userdata: Any, sock: Any) -> None:
        number = sock.fileno()
        super()._on_socket_register_write(client, userdata, sock)
        self._loop.call_soon_threadsafe(self._forget_if_closed, sock, number)

    def _forget_if_closed(self, sock: Any, number: int) -> None:
        if sock.fileno() != number:
            self._loop.remove_reader(number)
            self._loop.remove_writer(number)
