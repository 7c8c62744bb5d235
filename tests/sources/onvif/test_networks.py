"""Discovery on a machine with two networks: real interfaces, in network namespaces of this test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support import REPO
from tests.support.cameras.onvif_device import MATCH

ANSWER = """
import socket, struct, sys
one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
one.bind(("", 3702))
group = socket.inet_aton("239.255.255.250") + socket.inet_aton(sys.argv[1])
one.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
print("ready", flush=True)
while True:
    data, address = one.recvfrom(65536)
    one.sendto(sys.argv[2].encode(), address)
"""
FIND = "from saccade.sources.onvif.discovery import discover; print(*(one.host for one in discover(1.5)))"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def two_networks() -> Iterator[str]:
    """The name of a namespace with two networks, each with a camera at .2."""
    if os.name != "posix" or shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    here = f"saccade{os.getpid()}"
    with ExitStack() as stack:
        for name in (here, f"{here}-1", f"{here}-2"):
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError:
                pytest.skip("network namespaces are not allowed here")
            stack.callback(ip, "netns", "del", name)
        for number in ("1", "2"):
            there, net = f"{here}-{number}", f"10.99.{number}"
            ip("-n", here, "link", "add", f"n{number}", "type", "veth", "peer", "name", "camera", "netns", there)
            for space, link, host in ((here, f"n{number}", "1"), (there, "camera", "2")):
                ip("-n", space, "addr", "add", f"{net}.{host}/24", "dev", link)
                ip("-n", space, "link", "set", link, "up")
            answer = MATCH.replace("127.0.0.1:{port}", f"{net}.2:80")
            camera = subprocess.Popen(
                ["ip", "netns", "exec", there, sys.executable, "-c", ANSWER, f"{net}.2", answer],
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(camera.wait)
            stack.callback(camera.kill)
            assert camera.stdout is not None
            assert camera.stdout.readline() == "ready\n"
            stack.callback(camera.stdout.close)
        yield here


def test_cameras_on_every_network_are_found(two_networks: str) -> None:
    command = ["ip", "netns", "exec", two_networks, sys.executable, "-c", FIND]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["10.99.1.2", "10.99.2.2"]
