"""A small ONVIF device on 127.0.0.1: answers probes, and offers two profiles whose streams are at a given URI."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

from tests.support.http_server import serving

NAMES = (
    'xmlns:s="http://www.w3.org/2003/05/soap-envelope" xmlns:tds="http://www.onvif.org/ver10/device/wsdl" '
    'xmlns:trt="http://www.onvif.org/ver10/media/wsdl" xmlns:tt="http://www.onvif.org/ver10/schema"'
)
DATE = "<tt:Date><tt:Year>2026</tt:Year><tt:Month>1</tt:Month><tt:Day>2</tt:Day></tt:Date>"
TIME = "<tt:Time><tt:Hour>3</tt:Hour><tt:Minute>4</tt:Minute><tt:Second>5</tt:Second></tt:Time>"
CLOCK = (
    "<tds:GetSystemDateAndTimeResponse><tds:SystemDateAndTime><tt:DateTimeType>NTP</tt:DateTimeType>"
    f"<tt:DaylightSavings>false</tt:DaylightSavings><tt:UTCDateTime>{TIME}{DATE}</tt:UTCDateTime>"
    "</tds:SystemDateAndTime></tds:GetSystemDateAndTimeResponse>"
)
FAULT = (
    "<s:Fault><s:Code><s:Value>s:Sender</s:Value><s:Subcode>"
    '<s:Value xmlns:ter="http://www.onvif.org/ver10/error">ter:NotAuthorized</s:Value></s:Subcode></s:Code>'
    '<s:Reason><s:Text xml:lang="en">Sender not authorized</s:Text></s:Reason></s:Fault>'
)


def profile(token: str, width: int, height: int) -> str:
    return (
        f'<trt:Profiles token="{token}" fixed="true"><tt:Name>{token}</tt:Name>'
        f'<tt:VideoEncoderConfiguration token="v{token}"><tt:Name>v</tt:Name><tt:UseCount>1</tt:UseCount>'
        f"<tt:Encoding>H264</tt:Encoding><tt:Resolution><tt:Width>{width}</tt:Width><tt:Height>{height}</tt:Height>"
        "</tt:Resolution><tt:Quality>5</tt:Quality><tt:RateControl><tt:FrameRateLimit>25</tt:FrameRateLimit>"
        "<tt:EncodingInterval>1</tt:EncodingInterval><tt:BitrateLimit>4096</tt:BitrateLimit></tt:RateControl>"
        "<tt:H264><tt:GovLength>50</tt:GovLength><tt:H264Profile>Main</tt:H264Profile></tt:H264>"
        "<tt:Multicast><tt:Address><tt:Type>IPv4</tt:Type></tt:Address><tt:Port>0</tt:Port><tt:TTL>1</tt:TTL>"
        "<tt:AutoStart>false</tt:AutoStart></tt:Multicast><tt:SessionTimeout>PT60S</tt:SessionTimeout>"
        "</tt:VideoEncoderConfiguration></trt:Profiles>"
    )


@contextmanager
def onvif_device(stream: str, *, user: str = "bob", services: str = "") -> Iterator[int]:
    """A device that authenticates `user`, and says that its services are there; yields its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            place = services or f"http://127.0.0.1:{self.server.server_address[1]}/onvif"
            public = "GetSystemDateAndTime" in body
            allowed = public or f"{user}</" in body
            text = self._answer(body, place) if allowed else FAULT
            data = f'<?xml version="1.0"?><s:Envelope {NAMES}><s:Body>{text}</s:Body></s:Envelope>'.encode()
            self.send_response(200 if allowed else 400)
            self.send_header("Content-Type", "application/soap+xml; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _answer(self, body: str, place: str) -> str:
            if "GetSystemDateAndTime" in body:
                return CLOCK
            if "GetServices" in body:
                service = "<tds:Service><tds:Namespace>http://www.onvif.org/ver10/{0}/wsdl</tds:Namespace>"
                service += f"<tds:XAddr>{place}/{{0}}</tds:XAddr>"
                service += "<tds:Version><tt:Major>2</tt:Major><tt:Minor>0</tt:Minor></tds:Version></tds:Service>"
                both = service.format("device") + service.format("media")
                return f"<tds:GetServicesResponse>{both}</tds:GetServicesResponse>"
            if "GetProfiles" in body:
                both = profile("main", 3840, 2160) + profile("sub", 1280, 720)
                return f"<trt:GetProfilesResponse>{both}</trt:GetProfilesResponse>"
            token = re.findall(r"ProfileToken>(\w+)<", body)[0]
            return (
                f"<trt:GetStreamUriResponse><trt:MediaUri><tt:Uri>{stream}/{token}</tt:Uri>"
                "<tt:InvalidAfterConnect>false</tt:InvalidAfterConnect><tt:InvalidAfterReboot>false"
                "</tt:InvalidAfterReboot><tt:Timeout>PT0S</tt:Timeout></trt:MediaUri></trt:GetStreamUriResponse>"
            )

    with serving(Handler) as port:
        yield port


MATCH = (
    '<?xml version="1.0"?><e:Envelope xmlns:e="http://www.w3.org/2003/05/soap-envelope" '
    'xmlns:d="http://schemas.xmlsoap.org/ws/2005/04/discovery"><e:Body><d:ProbeMatches><d:ProbeMatch>'
    "<d:Scopes>onvif://www.onvif.org/name/Front%20Door onvif://www.onvif.org/hardware/IPC-1</d:Scopes>"
    "<d:XAddrs>http://127.0.0.1:{port}/onvif/device_service</d:XAddrs></d:ProbeMatch></d:ProbeMatches></e:Body>"
    "</e:Envelope>"
)


@contextmanager
def answering_probes(port: int) -> Iterator[tuple[str, int]]:
    """Answers probes for a device at `port`; yields where probes are to be sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.bind(("127.0.0.1", 0))

        def answer() -> None:
            while True:
                data, address = one.recvfrom(65_536)
                if data == b"stop":
                    return
                assert b"NetworkVideoTransmitter" in data
                for text in ("garbage", MATCH.replace("{port}", str(port)), MATCH.replace("{port}", str(port))):
                    one.sendto(text.encode(), address)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield one.getsockname()
        finally:
            one.sendto(b"stop", one.getsockname())
            thread.join()
