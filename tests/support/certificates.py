"""Certificates with and without faults, and a front that puts TLS before any server on 127.0.0.1."""

from __future__ import annotations

import hashlib
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


@dataclass(slots=True, frozen=True)
class Certificate:
    """A self-signed certificate in a file with its key."""

    path: Path

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(self.public)).hexdigest()

    @property
    def public(self) -> str:
        return self.path.read_text().partition("-----BEGIN PRIVATE")[0]


def make(path: Path, *, name: str = "127.0.0.1", days: int = 1) -> Certificate:
    """A certificate for `name` that expires in so many days."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, path.stem)])
    try:
        names: list[x509.GeneralName] = [x509.IPAddress(ip_address(name))]
    except ValueError:
        names = [x509.DNSName(name)]
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=9))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM) + private)
    return Certificate(path)


def trust(certificates: Sequence[Certificate], path: Path) -> Path:
    """A file of them all, for SSL_CERT_FILE."""
    path.write_text("".join(one.public for one in certificates))
    return path


class Front:
    """Decrypts what comes to `port` and carries it to a server in clear; `carried` is how many bytes of requests.

    Args:
        backend: the server's port.
        certificate: what is shown.
        later: what is shown from the second connection on.
    """

    def __init__(self, backend: int, certificate: Certificate, later: Certificate | None = None) -> None:
        self._backend = backend
        self._shown = [certificate, later or certificate]
        self.calls = 0
        self._stop = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self.port = int(self._listener.getsockname()[1])
        self.carried = 0
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._stop.set()
        for thread in list(self._threads):
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._stop.is_set():
            with suppress(TimeoutError):
                call, _ = self._listener.accept()
                shown = self._shown[min(self.calls, 1)]
                self.calls += 1
                self._threads.append(threading.Thread(target=self._carry, args=(call, shown)))
                self._threads[-1].start()

    def _carry(self, call: socket.socket, shown: Certificate) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(shown.path)
        call.settimeout(10)
        with call, suppress(OSError), context.wrap_socket(call, server_side=True) as secure:
            data = secure.recv(65536)
            if not data:
                return
            with socket.create_connection(("127.0.0.1", self._backend)) as backend:
                for one in (secure, backend):
                    one.settimeout(0.02)
                while not self._stop.is_set():
                    self.carried += len(data)
                    backend.sendall(data)
                    data = b""
                    for source, target in ((secure, None), (backend, secure)):
                        with suppress(TimeoutError):
                            got = source.recv(65536)
                            if not got:
                                return
                            if target is None:
                                data = got
                            else:
                                target.settimeout(10)
                                target.sendall(got)
                                target.settimeout(0.02)


@contextmanager
def front(backend: int, certificate: Certificate, later: Certificate | None = None) -> Iterator[Front]:
    made = Front(backend, certificate, later)
    try:
        yield made
    finally:
        made.close()
