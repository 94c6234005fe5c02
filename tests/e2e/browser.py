"""A headless Chromium, by its debugging pipe: for tests of pages and for the pictures of docs/."""
import base64
import json
import os
import pathlib
import shutil
import subprocess

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)


class Browser:
    """Chromium over its debugging pipe: file descriptors 3 and 4, a JSON message and a NUL each way."""

    def __init__(self, folder):
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        self._buffer, self._id, self.errors = b"", 0, []
        command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
                   f"--user-data-dir={folder}/chromium", "about:blank"]
        shell = f"exec {' '.join(command)} 3<&{to_browser} 4>&{from_browser} 2>{folder}/chromium.log"
        self._process = subprocess.Popen(["bash", "-c", shell], pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        target = next(t for t in self._send("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self._send("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")

    def close(self):
        self._send("Browser.close")
        self._process.wait(30)
        os.close(self._in)
        os.close(self._out)

    def _receive(self):
        while b"\0" not in self._buffer:
            more = os.read(self._in, 1 << 16)
            if not more:
                raise RuntimeError("chromium has gone")
            self._buffer += more
        message, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(message)
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown" or (method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning")):
            self.errors.append(params)
        if method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"])
        return message

    def _send(self, method, session=None, **params):
        self._id += 1
        message = {"id": self._id, "method": method, "params": params, **({"sessionId": session} if session else {})}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._receive()
            if reply.get("id") == self._id:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']}")
                return reply["result"]

    def __call__(self, method, **params):
        return self._send(method, self._session, **params)

    def _wait_for(self, method):
        while self._receive().get("method") != method:
            pass

    def open(self, url):
        self("Page.navigate", url=url)
        self._wait_for("Page.loadEventFired")

    def run(self, script):
        result = self("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def key(self, key, code, text=""):
        self("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **({"text": text} if text else {}))
        self("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def tab(self):
        self.key("Tab", 9)

    def enter_and_load(self):
        self.key("Enter", 13, "\r")
        self._wait_for("Page.loadEventFired")

    def look(self, width=1200, height=900, dark=False, media="screen"):
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self("Emulation.setEmulatedMedia", media=media, features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def picture(self, path, begin="", end=""):
        """A PNG of the page, from the heading `begin` up to the heading `end` where they are given."""
        width, top, bottom = self.run(f"""(() => {{
            const page = document.documentElement;
            const at = (text, otherwise) => text === "" ? otherwise
                : [...document.querySelectorAll("h2")].find(h => h.textContent === text).getBoundingClientRect().top + scrollY - 16;
            const last = document.body.getBoundingClientRect().bottom + scrollY;
            return [page.scrollWidth, at({json.dumps(begin)}, 0), at({json.dumps(end)}, last)]; }})()""")
        clip = {"x": 0, "y": top, "width": width, "height": bottom - top, "scale": 1}
        pathlib.Path(path).write_bytes(base64.b64decode(self("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]))
