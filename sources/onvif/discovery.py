"""ONVIF discovery (WS-Discovery): sends a multicast probe on every network interface and collects the replies.

Needs no optional dependency.
"""

from __future__ import annotations

import re
import socket
import struct
import time
import uuid
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

GROUP = ("239.255.255.250", 3702)
_MAX_ANSWER = 64 << 10
_PROBE = """<?xml version="1.0" encoding="UTF-8"?>
<e:Envelope xmlns:e="http://www.w3.org/2003/05/soap-envelope"
 xmlns:w="http://schemas.xmlsoap.org/ws/2004/08/addressing" xmlns:d="http://schemas.xmlsoap.org/ws/2005/04/discovery"
 xmlns:dn="http://www.onvif.org/ver10/network/wsdl"><e:Header><w:MessageID>uuid:{}</w:MessageID>
<w:To>urn:schemas-xmlsoap-org:ws:2005:04:discovery</w:To>
<w:Action>http://schemas.xmlsoap.org/ws/2005/04/discovery/Probe</w:Action></e:Header>
<e:Body><d:Probe><d:Types>dn:NetworkVideoTransmitter</d:Types></d:Probe></e:Body></e:Envelope>"""


@dataclass(slots=True, frozen=True, order=True)
class DiscoveredDevice:
    """An ONVIF device that replied to the discovery probe.

    Attributes:
        host, port: host and port of its device service.
        name, hardware: name and hardware from the device's scopes; "" if not stated.
    """

    host: str
    port: int
    name: str = ""
    hardware: str = ""


def discover(timeout_s: float = 3.0, group: tuple[str, int] = GROUP) -> list[DiscoveredDevice]:
    """Return the ONVIF devices that reply to a probe within `timeout_s` seconds, sorted by address.

    Args:
        timeout_s: how long to wait for replies, in seconds.
        group: multicast address and port of the probe.

    Raises:
        OSError: if the probe cannot be sent on any network interface.
    """
    found: dict[str, DiscoveredDevice] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 4)
        probe.bind(("", 0))
        deadline = time.monotonic() + timeout_s
        _send(probe, _PROBE.format(uuid.uuid4()).encode(), group)
        while (left := deadline - time.monotonic()) > 0:
            probe.settimeout(left)
            try:
                data, address = probe.recvfrom(_MAX_ANSWER)
            except TimeoutError:
                break
            for device in parse_matches(data, address[0]):
                found.setdefault(f"{device.host}:{device.port}", device)
    return sorted(found.values())


def _send(probe: socket.socket, data: bytes, group: tuple[str, int]) -> None:
    """Send the probe on every network interface. Raise the last OSError if all interfaces fail."""
    sent, failure = False, OSError("there is no network interface")
    for index, _ in socket.if_nameindex():
        try:
            # struct ip_mreqn: the group, a local address and the interface
            probe.setsockopt(
                socket.IPPROTO_IP, socket.IP_MULTICAST_IF, struct.pack("=4s4si", bytes(4), bytes(4), index)
            )
            probe.sendto(data, group)
            sent = True
        except OSError as error:  # for example an interface without an IPv4 address
            failure = error
    if not sent:
        raise failure


def parse_matches(data: bytes, sender: str) -> list[DiscoveredDevice]:
    """Parse the ONVIF devices in a reply from the host `sender`. Return an empty list for a malformed reply."""
    if b"<!DOCTYPE" in data or b"<!ENTITY" in data:
        return []  # an answer needs no entities, which could expand without limit
    try:
        root = ElementTree.fromstring(data)
    except (ElementTree.ParseError, ValueError):
        return []
    found = []
    for match in root.iter("{http://schemas.xmlsoap.org/ws/2005/04/discovery}ProbeMatch"):
        texts = {child.tag.rpartition("}")[2]: (child.text or "").split() for child in match}
        for address in texts.get("XAddrs", []):
            try:
                parts = urlsplit(address)
                host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
            except ValueError:
                continue
            if host and (host == sender or len(texts["XAddrs"]) == 1):
                scopes = texts.get("Scopes", [])
                found.append(DiscoveredDevice(host, port, _scope(scopes, "name"), _scope(scopes, "hardware")))
                break
    return found


def _scope(scopes: list[str], key: str) -> str:
    prefix = f"onvif://www.onvif.org/{key}/"
    value = next((scope[len(prefix) :] for scope in scopes if scope.startswith(prefix)), "")
    return re.sub(r"[^\x20-\x7e]", "?", unquote(value))[:80]
