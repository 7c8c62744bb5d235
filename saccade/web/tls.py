"""TLS for servers: loads certificate files, or creates a self-signed certificate."""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
import ssl
import tempfile
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography import x509

_VALID_DAYS = 30


def server_context(cert: str, key: str | None = None) -> ssl.SSLContext:
    """Create a TLS context for a server from a certificate file.

    Args:
        cert: path of the certificate.
        key: path of the private key; None if the key is in the file `cert`.

    Raises:
        ValueError: if the files cannot be read or do not match. The message is meant for the user.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key or None, password="")  # which also prevents a prompt on the terminal
    except OSError as error:  # SSLError is one
        why = (
            "the file is not a PEM certificate, or does not match its key"
            if isinstance(error, ssl.SSLError)
            else error.strerror
        )
        raise ValueError(f"cannot read the certificate {cert}: {why}") from None
    return context


def optional_context(cert: str | None, key: str | None) -> ssl.SSLContext | None:
    """Create a TLS context for a server if a certificate file is set, else return None.

    Raises:
        ValueError: if a key is set without a certificate, or the files are unusable; see `server_context`.
    """
    if key and not cert:
        raise ValueError("a TLS key is set without a certificate: set the certificate too")
    return server_context(cert, key) if cert else None


def self_signed(host: str) -> ssl.SSLContext:
    """Create a TLS context for a server, with a new self-signed certificate for `host` and this machine's addresses."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "saccade")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(
            issuer_name=name,
            subject_name=name,
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - datetime.timedelta(days=1),
            not_valid_after=now + datetime.timedelta(days=_VALID_DAYS),
        )
        .add_extension(x509.SubjectAlternativeName(_general_names(host)), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    with tempfile.TemporaryDirectory() as folder:  # readable by this user only
        path = os.path.join(folder, "server.pem")
        with open(path, "wb") as file:
            file.write(certificate.public_bytes(serialization.Encoding.PEM) + pem)
        return server_context(path)


def _general_names(host: str) -> list[x509.GeneralName]:
    from cryptography import x509

    addresses = {"127.0.0.1", "::1", host}
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect(("192.0.2.1", 9))  # sends nothing; it only chooses the address that other machines reach
        addresses.add(route.getsockname()[0])
    names: list[x509.GeneralName] = [x509.DNSName("localhost")]
    for one in sorted(addresses):
        try:
            address = ipaddress.ip_address(one)
        except ValueError:
            names.append(x509.DNSName(one))
        else:
            if not address.is_unspecified:
                names.append(x509.IPAddress(address))
    return names
