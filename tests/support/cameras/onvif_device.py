"""A virtual ONVIF camera on 127.0.0.1: an HTTP server that answers SOAP requests and probes.

It has the services Media and, as configured, Media2, PTZ and events. It checks the password as a camera does.
"""

from __future__ import annotations

import base64
import hashlib
import queue
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import unescape
from http.server import BaseHTTPRequestHandler
from xml.sax.saxutils import escape

from tests.support.http_server import serving

NAMES = (
    'xmlns:s="http://www.w3.org/2003/05/soap-envelope" xmlns:tds="http://www.onvif.org/ver10/device/wsdl" '
    'xmlns:trt="http://www.onvif.org/ver10/media/wsdl" xmlns:tr2="http://www.onvif.org/ver20/media/wsdl" '
    'xmlns:tev="http://www.onvif.org/ver10/events/wsdl" xmlns:wsnt="http://docs.oasis-open.org/wsn/b-2" '
    'xmlns:wsa="http://www.w3.org/2005/08/addressing" xmlns:tns1="http://www.onvif.org/ver10/topics" '
    'xmlns:tptz="http://www.onvif.org/ver20/ptz/wsdl" xmlns:tt="http://www.onvif.org/ver10/schema"'
)
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)  # the clock of the camera stands still, and is wrong
CLOCK = (
    "<tds:GetSystemDateAndTimeResponse><tds:SystemDateAndTime><tt:DateTimeType>NTP</tt:DateTimeType>"
    "<tt:DaylightSavings>false</tt:DaylightSavings><tt:UTCDateTime>"
    f"<tt:Time><tt:Hour>{NOW.hour}</tt:Hour><tt:Minute>{NOW.minute}</tt:Minute><tt:Second>{NOW.second}</tt:Second>"
    f"</tt:Time><tt:Date><tt:Year>{NOW.year}</tt:Year><tt:Month>{NOW.month}</tt:Month><tt:Day>{NOW.day}</tt:Day>"
    "</tt:Date></tt:UTCDateTime></tds:SystemDateAndTime></tds:GetSystemDateAndTimeResponse>"
)
PASSWORD = "secret"
_SKEW_S = 3600.0


class FaultError(Exception):
    """A request that the camera answers with a SOAP fault."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code

    @property
    def text(self) -> str:
        return (
            "<s:Fault><s:Code><s:Value>s:Sender</s:Value><s:Subcode>"
            f'<s:Value xmlns:ter="http://www.onvif.org/ver10/error">ter:{self.code}</s:Value></s:Subcode></s:Code>'
            f'<s:Reason><s:Text xml:lang="en">{self}</s:Text></s:Reason></s:Fault>'
        )


@dataclass
class MediaProfile:
    """A profile of the camera, and the size and codec of its stream."""

    token: str
    width: int
    height: int
    codec: str = "H264"
    ptz: bool = False

    @property
    def media(self) -> str:
        """The profile in the service Media, which knows no H.265."""
        size = f"<tt:Width>{self.width}</tt:Width><tt:Height>{self.height}</tt:Height>"
        encoder = (
            '<tt:VideoEncoderConfiguration token="v"><tt:Name>v</tt:Name><tt:UseCount>1</tt:UseCount>'
            f"<tt:Encoding>{self.codec}</tt:Encoding><tt:Resolution>{size}"
            "</tt:Resolution><tt:Quality>5</tt:Quality><tt:RateControl><tt:FrameRateLimit>25</tt:FrameRateLimit>"
            "<tt:EncodingInterval>1</tt:EncodingInterval><tt:BitrateLimit>4096</tt:BitrateLimit></tt:RateControl>"
            "<tt:H264><tt:GovLength>50</tt:GovLength><tt:H264Profile>Main</tt:H264Profile></tt:H264>"
            "<tt:Multicast><tt:Address><tt:Type>IPv4</tt:Type></tt:Address><tt:Port>0</tt:Port><tt:TTL>1</tt:TTL>"
            "<tt:AutoStart>false</tt:AutoStart></tt:Multicast><tt:SessionTimeout>PT60S</tt:SessionTimeout>"
            "</tt:VideoEncoderConfiguration>"
        )
        ptz = (
            '<tt:PTZConfiguration token="p"><tt:Name>p</tt:Name><tt:UseCount>1</tt:UseCount><tt:NodeToken>n'
            "</tt:NodeToken></tt:PTZConfiguration>"
        )
        token = escape(self.token)
        return (
            f'<trt:Profiles token="{token}" fixed="true"><tt:Name>{token}</tt:Name>'
            f"{encoder if self.codec == 'H264' else ''}{ptz if self.ptz else ''}</trt:Profiles>"
        )

    @property
    def media2(self) -> str:
        """The profile in the service Media2."""
        token, ptz = escape(self.token), '<tr2:PTZ token="p"/>'
        return (
            f'<tr2:Profiles token="{token}" fixed="true"><tr2:Name>{token}</tr2:Name><tr2:Configurations>'
            f'<tr2:VideoEncoder token="v{token}" GovLength="50" Profile="Main"><tt:Name>v</tt:Name>'
            f"<tt:UseCount>1</tt:UseCount><tt:Encoding>{self.codec}</tt:Encoding><tt:Resolution>"
            f"<tt:Width>{self.width}</tt:Width><tt:Height>{self.height}</tt:Height></tt:Resolution>"
            '<tt:RateControl ConstantBitRate="false"><tt:FrameRateLimit>25</tt:FrameRateLimit>'
            "<tt:BitrateLimit>4096</tt:BitrateLimit></tt:RateControl><tt:Quality>5</tt:Quality></tr2:VideoEncoder>"
            f"{ptz if self.ptz else ''}</tr2:Configurations></tr2:Profiles>"
        )


@dataclass
class OnvifCamera:
    """A virtual camera.

    Attributes:
        stream: RTSP address before the token of a profile.
        profiles: the profiles.
        user: the only user.
        services: address of the services besides the device service; "" for this server.
        media2: whether the camera has the service Media2; "broken" if its requests fail.
        presets: names of the PTZ presets, by token; None for a camera without PTZ.
        position: token of the preset at which the camera is.
        locked: whether the camera refuses to turn.
        events: whether the camera has events.
        signals: whether each signal is active, by topic, source and name of the state.
        asked: names of the requests, such as media/GetProfiles.
    """

    stream: str = "rtsp://127.0.0.1:1"
    profiles: list[MediaProfile] = field(
        default_factory=lambda: [MediaProfile("main", 3840, 2160), MediaProfile("sub", 1280, 720)]
    )
    user: str = "bob"
    services: str = ""
    media2: bool | str = False
    presets: dict[str, str] | None = None
    position: str = ""
    locked: bool = False
    events: bool = False
    signals: dict[tuple[str, str, str], bool] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    _messages: queue.Queue[str] = field(default_factory=queue.Queue)

    def report(self, topic: str, source: str, state: str, active: bool) -> None:
        """Send an event to the subscriber, such as VideoSource/MotionAlarm."""
        self.signals[topic, source, state] = active
        value = f'<tt:SimpleItem Name="{state}" Value="{str(active).lower()}"/>'
        self._messages.put(
            '<wsnt:NotificationMessage><wsnt:Topic Dialect="http://www.onvif.org/ver10/tev/topicExpression/ConcreteSet">'
            f'tns1:{topic}</wsnt:Topic><wsnt:Message><tt:Message UtcTime="2026-01-02T03:04:05Z" '
            f'PropertyOperation="Changed"><tt:Source><tt:SimpleItem Name="Source" Value="{source}"/></tt:Source>'
            f"<tt:Data>{value}</tt:Data></tt:Message></wsnt:Message></wsnt:NotificationMessage>"
        )

    def answer(self, service: str, request: str, body: str, place: str) -> str:
        """Return the body of the answer to a request."""
        if request != "GetSystemDateAndTime":
            self._authenticate(body)
        self.asked.append(f"{service}/{request}")
        if service == "media2" and self.media2 == "broken":
            raise FaultError("ActionNotSupported", "not supported")
        token = unescape(next(iter(re.findall(r"ProfileToken>([^<]+)<", body)), ""))
        if token and token not in [profile.token for profile in self.profiles]:
            raise FaultError("NoProfile", f"no profile {token}")
        match service, request:
            case _, "GetSystemDateAndTime":
                return CLOCK
            case _, "GetServices":
                return f"<tds:GetServicesResponse>{self._listed(place)}</tds:GetServicesResponse>"
            case "media", "GetProfiles":
                both = "".join(profile.media for profile in self.profiles)
                return f"<trt:GetProfilesResponse>{both}</trt:GetProfilesResponse>"
            case "media2", "GetProfiles":
                both = "".join(profile.media2 for profile in self.profiles)
                return f"<tr2:GetProfilesResponse>{both}</tr2:GetProfilesResponse>"
            case "media", "GetStreamUri":
                return (
                    f"<trt:GetStreamUriResponse><trt:MediaUri><tt:Uri>{self.stream}/{escape(token)}</tt:Uri>"
                    "<tt:InvalidAfterConnect>false</tt:InvalidAfterConnect><tt:InvalidAfterReboot>false"
                    "</tt:InvalidAfterReboot><tt:Timeout>PT0S</tt:Timeout></trt:MediaUri></trt:GetStreamUriResponse>"
                )
            case "media2", "GetStreamUri":
                uri = f"{self.stream}/{escape(token)}"
                return f"<tr2:GetStreamUriResponse><tr2:Uri>{uri}</tr2:Uri></tr2:GetStreamUriResponse>"
            case "ptz", "GetPresets":
                presets = "".join(
                    f'<tptz:Preset token="{escape(preset)}"><tt:Name>{escape(name)}</tt:Name></tptz:Preset>'
                    for preset, name in (self.presets or {}).items()
                )
                return f"<tptz:GetPresetsResponse>{presets}</tptz:GetPresetsResponse>"
            case "ptz", "GotoPreset":
                preset = unescape(re.findall(r"PresetToken>([^<]+)<", body)[0])
                if preset not in (self.presets or {}):
                    raise FaultError("NoToken", f"The requested preset token does not exist: {preset}")
                if self.locked:
                    raise FaultError("OperationProhibited", "a person turns the camera")
                self.position = preset
                return "<tptz:GotoPresetResponse/>"
            case "events", _:
                return self._event_answer(request, place)
        raise FaultError("ActionNotSupported", f"{service} has no {request}")

    def _event_answer(self, request: str, place: str) -> str:
        until = "2026-01-02T03:05:05Z"
        times = "<{0}:CurrentTime>2026-01-02T03:04:05Z</{0}:CurrentTime><{0}:TerminationTime>{1}</{0}:TerminationTime>"
        match request:
            case "CreatePullPointSubscription":
                address = f"<wsa:Address>{place}/events</wsa:Address>"
                inner = f"<tev:SubscriptionReference>{address}</tev:SubscriptionReference>{times.format('wsnt', until)}"
                return f"<tev:CreatePullPointSubscriptionResponse>{inner}</tev:CreatePullPointSubscriptionResponse>"
            case "SetSynchronizationPoint":
                for (topic, source, state), active in list(self.signals.items()):
                    self.report(topic, source, state, active)
                return "<tev:SetSynchronizationPointResponse/>"
            case "PullMessages":
                try:
                    message = self._messages.get(timeout=0.5)
                except queue.Empty:
                    message = ""
                inner = times.format("tev", until) + message
                return f"<tev:PullMessagesResponse>{inner}</tev:PullMessagesResponse>"
            case "Unsubscribe":
                return "<wsnt:UnsubscribeResponse/>"
        raise FaultError("ActionNotSupported", f"events has no {request}")

    def _listed(self, place: str) -> str:
        names = {"device": "ver10/device", "media": "ver10/media"}
        names |= {"media2": "ver20/media"} if self.media2 else {}
        names |= {"events": "ver10/events"} if self.events else {}
        names |= {"ptz": "ver20/ptz"} if self.presets is not None else {}
        return "".join(
            f"<tds:Service><tds:Namespace>http://www.onvif.org/{name}/wsdl</tds:Namespace>"
            f"<tds:XAddr>{self.services or place}/{service}</tds:XAddr>"
            "<tds:Version><tt:Major>2</tt:Major><tt:Minor>0</tt:Minor></tds:Version></tds:Service>"
            for service, name in names.items()
        )

    def _authenticate(self, body: str) -> None:
        """Check the WS-Security header, including its time: a camera refuses a time that is far from its own."""
        found = dict(re.findall(r"<(?:\w+:)?(Username|Password|Nonce|Created)\b[^>]*>([^<]+)<", body))
        if found.keys() >= {"Username", "Password", "Nonce", "Created"}:
            created = found["Created"]
            text = base64.b64decode(found["Nonce"]) + created.encode() + PASSWORD.encode()
            digest = base64.b64encode(hashlib.sha1(text).digest()).decode()
            late_s = abs((datetime.fromisoformat(created) - NOW).total_seconds())
            if (found["Username"], found["Password"]) == (self.user, digest) and late_s < _SKEW_S:
                return
        raise FaultError("NotAuthorized", "Sender not authorized")


@contextmanager
def serving_camera(camera: OnvifCamera) -> Iterator[int]:
    """Serve the requests of a virtual camera; yields its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            found = re.search(r"Body\b[^>]*>\s*<(?:\w+:)?(\w+)", body)
            assert found is not None
            place = f"http://127.0.0.1:{self.server.server_address[1]}/onvif"
            status = 200
            try:
                text = camera.answer(self.path.rpartition("/")[2].removesuffix("_service"), found[1], body, place)
            except FaultError as error:
                status, text = 400, error.text
            data = f'<?xml version="1.0"?><s:Envelope {NAMES}><s:Body>{text}</s:Body></s:Envelope>'.encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/soap+xml; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with serving(Handler) as port:
        yield port


@contextmanager
def onvif_device(stream: str, *, user: str = "bob", services: str = "") -> Iterator[int]:
    """Serve a virtual camera with a main and a sub profile; yields its port."""
    with serving_camera(OnvifCamera(stream, user=user, services=services)) as port:
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
