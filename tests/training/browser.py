"""Headless Chromium, controlled through a pipe, to look at pages. Nothing uses a network."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)
SWITCHES = (
    *("headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "no-first-run"),
    *("hide-scrollbars", "disable-background-networking", "remote-debugging-pipe"),
)


@contextmanager
def browser(profile):
    """A Page of a browser whose profile is in a folder of the test's."""
    (theirs, ours), (our_end, their_end) = ([high(end) for end in os.pipe()] for _ in range(2))

    def connect():
        os.dup2(theirs, 3)
        os.dup2(their_end, 4)

    switches = [f"--{switch}" for switch in (*SWITCHES, f"user-data-dir={profile}")]
    process = subprocess.Popen(
        [PROGRAM, *switches, "about:blank"],
        preexec_fn=connect,
        close_fds=False,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs), os.close(their_end)
    try:
        yield Page(ours, our_end)
    finally:
        process.terminate()
        process.wait(timeout=30)
        os.close(ours), os.close(our_end)


def high(end):
    """A pipe's end under a number above 3 and 4, the numbers that the browser uses."""
    moved = fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(end)
    return moved


class Page:
    """The one page of a browser, and the events in it."""

    def __init__(self, to, back):
        self.to, self.back, self.session = to, back, None
        self.count, self.events, self.buffer = 0, [], b""
        targets = self.ask("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self.session = self.ask("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method, **params):
        """Send a command and wait for its result."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while (reply := self.read()).get("id") != self.count:
            pass
        assert "error" not in reply, f"{method}: {reply}"
        return reply["result"]

    def read(self):
        """The next message; events are kept."""
        deadline = time.monotonic() + 60
        while b"\0" not in self.buffer:
            ready = select.select([self.back], [], [], max(0, deadline - time.monotonic()))[0]
            assert ready, "the browser does not reply"
            data = os.read(self.back, 1 << 20)
            assert data, "the browser has ended"
            self.buffer += data
        message, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(message)
        if "method" in message:
            self.events.append(message)
        return message

    def open(self, path, width=1200, height=900, dark=False):
        """Load a file and wait until it is loaded."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.ask("Page.navigate", url=Path(path).resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.read()

    def js(self, expression):
        """The value of an expression in the page."""
        reply = self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def point_at(self, x, y):
        """Move the mouse."""
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x, y):
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def complaints(self):
        """The page's exceptions, and whatever was written to its console."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [event["params"] for event in self.events if event["method"] in kinds]

    def requests(self):
        """The URLs that the page requested, its own included."""
        sent = [e["params"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [params["request"]["url"] for params in sent]

    def screenshot(self, path, whole=False, height=None):
        """Write a picture of the window, or of the whole page."""
        options = {}
        if whole:
            size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"]}
            options = {"captureBeyondViewport": True, "clip": clip | {"scale": 1}}
        shot = self.ask("Page.captureScreenshot", **options)
        Path(path).write_bytes(base64.b64decode(shot["data"]))
