#!/usr/bin/python3
"""A camera for the tests: `rtsp_server.py PORT [--fps 25] [--gop 25] [--user U --password P] [--lose 0.01]`.

Runs with the system's Python, for Debian's GStreamer. Its frames, 640×360 grey with a white square on its way across,
hold the sender's clock in their top 20 rows: Unix time in ms, 32 bits from left to right, least significant first,
bright for 1. The 20 rows below hold the frame's number in the same way. Paths: /live (H.264), /hevc, /jpeg, /j2k (which
FFmpeg cannot take from RTP), /sound alone, and with a tick of sound each second /aac and /opus (H.264), /pcma (H.264
with B-frames) and /hevc-pcmu. /srtp is /live encrypted, with its key in
MIKEY. `--clip aac=FILE.mkv` plays a file at /clip-aac; so do opus and pcma.
`--raw main=FILE,960,540` plays raw I420 images for ever at /main, at the same time as those of other `--raw`.
"""

import argparse
import itertools
import signal
import time

import gi

gi.require_version("Gst", "1.0")
gi.require_version("GstRtspServer", "1.0")
gi.require_version("GstRtsp", "1.0")
from gi.repository import GLib, Gst, GstRtsp, GstRtspServer  # noqa: E402

WIDTH, HEIGHT = 640, 360
BLOCK = WIDTH // 32
GREY = 0x60

parser = argparse.ArgumentParser()
parser.add_argument("port")
parser.add_argument("--fps", type=int, default=25)
parser.add_argument("--gop", type=int, default=25)
parser.add_argument("--user")
parser.add_argument("--password", default="")
parser.add_argument("--lose", type=float, default=0)
parser.add_argument("--raw", action="append", default=[])
parser.add_argument("--clip", action="append", default=[])
arguments = parser.parse_args()

Gst.init(None)
EMPTY = bytes([GREY]) * (WIDTH * HEIGHT) + b"\x80" * (WIDTH * HEIGHT // 2)
CODERS = {
    "bframes": f"x264enc speed-preset=ultrafast bframes=3 key-int-max={arguments.gop} bitrate=4000 "
    "! h264parse config-interval=-1 ! rtph264pay pt=96",
    "live": f"x264enc tune=zerolatency speed-preset=ultrafast key-int-max={arguments.gop} bitrate=4000 "
    "! h264parse config-interval=-1 ! rtph264pay pt=96",
    "hevc": f"x265enc tune=zerolatency speed-preset=ultrafast key-int-max={arguments.gop} bitrate=2000 "
    "! h265parse config-interval=-1 ! rtph265pay pt=96",
    "jpeg": "jpegenc ! rtpjpegpay",
    "j2k": "openjpegenc ! rtpj2kpay pt=96",
}


def frame(now_ms: int, number: int) -> bytes:
    data = bytearray(EMPTY)
    for top, value in ((0, now_ms), (20, number)):
        row = b"".join(bytes([235 if value >> bit & 1 else 16]) * BLOCK for bit in range(32))
        data[top * WIDTH : (top + 20) * WIDTH] = row * 20
    left = now_ms // 4 % (WIDTH - 40)
    for y in range(160, 200):
        data[y * WIDTH + left : y * WIDTH + left + 40] = b"\xeb" * 40
    return bytes(data)


class Raw:
    """Raw images for /NAME. All that are watched show the image of the same number at the same time."""

    number = 0

    def __init__(self, text: str) -> None:
        self.name, _, rest = text.partition("=")
        path, width, height = rest.split(",")
        self.width, self.height = int(width), int(height)
        with open(path, "rb") as file:
            data = file.read()
        size = self.width * self.height * 3 // 2
        self.images = [data[at : at + size] for at in range(0, len(data), size)]
        self.playing = []

    def configure(self, _: object, media: GstRtspServer.RTSPMedia) -> None:
        source = media.get_element().get_child_by_name("src")
        source.connect("seek-data", lambda *_: True)
        self.playing.append(source)
        media.connect("unprepared", lambda _: self.playing.remove(source))

    @classmethod
    def tick(cls) -> bool:
        now = Gst.SystemClock.obtain().get_time()
        for one in RAWS:
            for source in one.playing:
                if source.get_clock() is None or source.current_state != Gst.State.PLAYING:
                    continue
                buffer = Gst.Buffer.new_wrapped(one.images[cls.number % len(one.images)])
                buffer.pts = max(0, now - source.get_base_time())
                source.emit("push-buffer", buffer)
        cls.number += 1
        return True


RAWS = [Raw(text) for text in arguments.raw]


def configure(_: object, media: GstRtspServer.RTSPMedia) -> None:
    source = media.get_element().get_child_by_name("src")
    source.connect("seek-data", lambda *_: True)
    stopped = []
    numbers = itertools.count()

    def tick() -> bool:
        if stopped:
            return False
        now_ms = int(time.time() * 1000) & 0xFFFFFFFF
        source.emit("push-buffer", Gst.Buffer.new_wrapped(frame(now_ms, next(numbers))))
        return True

    GLib.timeout_add(1000 // arguments.fps, tick)
    media.connect("unprepared", lambda _: stopped.append(True))


server = GstRtspServer.RTSPServer()
server.set_address("127.0.0.1")
server.set_service(arguments.port)
caps = f"video/x-raw,format=I420,width={WIDTH},height={HEIGHT},framerate={arguments.fps}/1"
end = f"! identity name=pay0 drop-probability={arguments.lose}" if arguments.lose else "name=pay0"
launches = {
    name: f"( appsrc name=src is-live=true do-timestamp=true format=time caps={caps} ! {coder} {end} )"
    for name, coder in CODERS.items()
}
TICKS = "audiotestsrc is-live=true wave=ticks ! audioconvert ! audioresample"
SOUNDS = {
    "aac": ("live", "audio/x-raw,rate=48000,channels=2 ! voaacenc ! rtpmp4gpay pt=97"),
    "opus": ("live", "opusenc ! rtpopuspay pt=97"),
    "pcma": ("bframes", "audio/x-raw,rate=8000,channels=1 ! alawenc ! rtppcmapay"),
    "hevc-pcmu": ("hevc", "audio/x-raw,rate=8000,channels=1 ! mulawenc ! rtppcmupay"),
}
for name, (video, sound) in SOUNDS.items():
    # A source that cannot seek beside one that can makes the server refuse PLAY.
    seekable = launches[video][:-2].replace("name=src", "name=src stream-type=seekable")
    launches[name] = f"{seekable} {TICKS} ! {sound} name=pay1 )"
CLIP_SOUNDS = {
    "aac": "aacparse ! rtpmp4gpay pt=97",
    "opus": "opusparse ! rtpopuspay pt=97",
    "pcma": "audioconvert ! alawenc ! rtppcmapay",
}
for name, _, path in (one.partition("=") for one in arguments.clip):
    launches[f"clip-{name}"] = (
        f"( filesrc location={path} ! matroskademux name=d d.video_0 ! queue ! h264parse config-interval=-1 "
        f"! rtph264pay pt=96 name=pay0 d.audio_0 ! queue ! {CLIP_SOUNDS[name]} name=pay1 )"
    )
launches["srtp"] = launches["live"]
for raw in RAWS:
    form = caps.replace(f"width={WIDTH},height={HEIGHT}", f"width={raw.width},height={raw.height}")
    launches[raw.name] = f"( appsrc name=src is-live=true format=time caps={form} ! {CODERS['live']} name=pay0 )"
if RAWS:
    GLib.timeout_add(1000 // arguments.fps, Raw.tick)
launches["sound"] = "( audiotestsrc is-live=true ! rtpL16pay name=pay0 )"
if arguments.user:
    auth = GstRtspServer.RTSPAuth()
    auth.set_supported_methods(GstRtsp.RTSPAuthMethod.DIGEST)
    token = GstRtspServer.RTSPToken()
    token.set_string("media.factory.role", "viewer")
    auth.add_digest(arguments.user, arguments.password, token)
    server.set_auth(auth)
for name, launch in launches.items():
    factory = GstRtspServer.RTSPMediaFactory()
    factory.set_launch(launch)
    factory.set_shared(True)
    if name == "srtp":
        factory.set_profiles(GstRtsp.RTSPProfile.SAVP)
    if raws := [one for one in RAWS if one.name == name]:
        factory.connect("media-configure", raws[0].configure)
    elif name != "sound" and not name.startswith("clip-"):
        factory.connect("media-configure", configure)
    if arguments.user:
        permissions = GstRtspServer.RTSPPermissions()
        for what in ("access", "construct"):
            permissions.add_permission_for_role("viewer", f"media.factory.{what}", True)
        factory.set_permissions(permissions)
    server.get_mount_points().add_factory(f"/{name}", factory)
connections = []


def count(_: object, client: GstRtspServer.RTSPClient) -> None:
    connections.append(client)
    print(f"client {len(connections)}", flush=True)


server.connect("client-connected", count)
server.attach(None)
print("ready", flush=True)
loop = GLib.MainLoop()
signal.signal(signal.SIGTERM, lambda *_: loop.quit())
loop.run()
