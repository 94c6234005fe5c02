"""The web page in headless Chromium: what a person sees and can do, with the keyboard alone, on a narrow screen, in the dark; no console errors.
Skipped (exit code 77) where there is no chromium. STATETAP_SCREENSHOTS=DIR keeps pictures."""
import base64
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest
import urllib.error
import urllib.parse
import urllib.request

BIN = pathlib.Path(os.environ["STATETAP_BIN"])
ROOT = pathlib.Path(os.environ["STATETAP_ROOT"])
CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
TOKEN = "a-token-of-the-test"


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

    def look(self, width=1200, height=900, dark=False):
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def picture(self, name):
        if folder := os.environ.get("STATETAP_SCREENSHOTS"):
            data = self("Page.captureScreenshot", captureBeyondViewport=True)["data"]
            (pathlib.Path(folder) / f"{name}.png").write_bytes(base64.b64decode(data))


def setUpModule():
    global folder, server, http, browser, shown
    folder = tempfile.mkdtemp(prefix="statetap-web-")
    with open(f"{folder}/server.log", "w") as log:
        server = subprocess.Popen([BIN / "statetapd", "--model", ROOT / "models/tiny-kimi", "--data", f"{folder}/data", "--listen", "127.0.0.1:0",
                                   "--http", "127.0.0.1:0", "--backend", "cpu", "--http-token", TOKEN], stdout=subprocess.PIPE, stderr=log, text=True)
    ready = server.stdout.readline()
    os.environ["STATETAP_SERVER"], http = (ready.split(f"{name}=")[1].split()[0] for name in ("grpc", "http"))
    http = f"http://{http}"
    prompts = [{"id": f"q{i}", "messages": [{"role": "user", "content": f"What is {i} and <b>{i + 1}</b>?"}]} for i in range(24)]
    prompts.append({"id": "refused", "input_ids": [1 << 20]})
    prompts[3]["messages"][0]["content"] += " w" + "o" * 300 + "rd"
    pathlib.Path(folder, "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    shown = cli("submit", f"{folder}/prompts.jsonl", "--mode", "generate", "--name", "shown", "--max-new-tokens", "24", "--wait",
                "--max-rejected", "1")["id"]
    browser = Browser(folder)


def tearDownModule():
    browser.close()
    server.terminate()
    server.wait(60)
    server.stdout.close()
    shutil.rmtree(folder, ignore_errors=True)


def cli(*arguments):
    result = subprocess.run([BIN / "statetap", "--json", *arguments], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, (arguments, result)
    return json.loads(result.stdout)


def post(path, headers={}, **fields):
    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_):
            return None
    request = urllib.request.Request(http + path, urllib.parse.urlencode(fields).encode(), headers)
    try:
        return urllib.request.build_opener(Stay).open(request)
    except urllib.error.HTTPError as reply:
        return reply


def unfinished(name):
    """A job with far more to do than the test waits for."""
    path = pathlib.Path(folder, "long.jsonl")
    path.write_text("".join(json.dumps({"id": f"{i}", "prompt": f"Tell me about {i}."}) + "\n" for i in range(4000)))
    return cli("submit", str(path), "--name", name, "--temperature", "5", "--top-p", "1")["id"]


class PageTest(unittest.TestCase):
    def setUp(self):
        browser.errors.clear()
        browser.look()
        browser("Network.clearBrowserCookies")

    def tearDown(self):
        self.assertEqual(browser.errors, [])

    def paths(self):
        return {"jobs": "/", "job": f"/job?id={shown}", "samples": f"/samples?job={shown}", "sample": f"/sample?job={shown}&id=q3"}

    def test_console_errors_are_seen(self):
        browser.open(http + "/")
        browser.run("console.error('this test can fail'); document.body.append(Object.assign(new Image(), {src: '/no-image'}))")
        self.assertGreaterEqual(len(browser.errors), 2)  # the second: the policy of the page allows no image
        browser.errors.clear()

    def test_pages_fit_wide_and_narrow_light_and_dark(self):
        for name, path in self.paths().items():
            for width in (1200, 400):
                for dark in (False, True):
                    browser.look(width, dark=dark)
                    browser.open(http + path)
                    with self.subTest(page=name, width=width, dark=dark):
                        self.assertLessEqual(browser.run("document.documentElement.scrollWidth"), width)
                        # What sticks out of the screen lies in a box of its own that scrolls.
                        self.assertEqual(browser.run("""[...document.querySelectorAll("main *")].filter(e => !e.closest(".scroll") &&
                            e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 200))"""), [])
                        # Words in pictures are not shrunk with them.
                        self.assertGreater(browser.run("Math.min(99, ...[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height))"), 8)
                        ink, paper = browser.run("""[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]
                            .map(c => c.match(/\\d+/g).map(Number).slice(0, 3).reduce((a, b) => a + b))""")
                        self.assertGreater((ink - paper) * (1 if dark else -1), 450)  # of 765
                    browser.picture(f"{name}-{width}-{'dark' if dark else 'light'}")

    def test_everything_is_reached_by_the_tab_key(self):
        for name, path in self.paths().items():
            browser.open(http + path)
            wanted = browser.run("""(window.wanted = [...document.querySelectorAll("a, button, summary, input:not([type=hidden]), .scroll")]
                .filter(e => e.checkVisibility())).length""")
            self.assertGreater(wanted, 1)
            reached = set()
            for _ in range(wanted):
                browser.tab()
                at, outline = browser.run("[wanted.indexOf(document.activeElement), getComputedStyle(document.activeElement).outlineStyle]")
                self.assertNotEqual(outline, "none", name)
                reached.add(at)
            self.assertEqual(reached, set(range(wanted)), name)

    def test_a_page_brings_itself_up_to_date_and_keeps_the_focus(self):
        browser.open(http + "/")
        browser.run("document.querySelector('main a').focus(); window.same = true")
        job = unfinished("arrives later")
        browser.run("""new Promise(done => { const look = () => document.querySelector("main").textContent.includes("arrives later") ? done()
            : setTimeout(look, 50); look(); })""")
        self.assertTrue(browser.run("window.same && document.activeElement.tagName === 'A'"))
        cli("cancel", job)

    def test_without_the_token_nothing_can_be_changed(self):
        job = unfinished("stays")
        browser.open(f"{http}/job?id={job}")
        self.assertEqual(browser.run("""[...document.querySelectorAll("form")].map(f => f.getAttribute("action"))"""), ["/unlock"])
        self.assertEqual(post("/act", job=job, do="cancel").status, 403)
        self.assertEqual(post("/act", {"Authorization": "Bearer wrong"}, job=job, do="cancel").status, 403)
        self.assertEqual(post("/unlock", token="wrong").status, 403)
        given = post("/unlock", token=TOKEN, back="//elsewhere.example/")
        self.assertEqual((given.status, given.headers["Location"]), (303, "/"))
        self.assertIn("HttpOnly; SameSite=Strict", given.headers["Set-Cookie"])
        cookie = given.headers["Set-Cookie"].split(";")[0]
        self.assertNotIn(TOKEN, cookie)
        # Another site's form would come with the cookie, and without the key.
        self.assertEqual(post("/act", {"Cookie": cookie}, job=job, do="cancel").status, 403)
        self.assertNotEqual(cli("show", job)["state"], "cancelled")
        program = {"Authorization": f"Bearer {TOKEN}"}
        self.assertEqual(post("/act", program, job=job, do="explode").status, 404)
        self.assertEqual(post("/act", program, job="none", do="cancel").status, 404)
        self.assertEqual(post("/act", program, job=job, do="cancel").status, 303)
        self.assertEqual(cli("show", job)["state"], "cancelled")
        self.assertEqual(post("/act", program, job=job, do="pause").status, 409)

    def test_pause_resume_and_cancel_by_keyboard(self):
        job = unfinished("steered")
        browser.open(f"{http}/job?id={job}")
        def go_to(selector):
            for _ in range(30):
                browser.tab()
                if browser.run(f"document.activeElement.matches({selector!r})"):
                    return
            self.fail(f"{selector} is not reached")
        go_to("input[type=password]")
        browser("Input.insertText", text=TOKEN)
        browser.enter_and_load()
        self.assertTrue(browser.run("location.search").endswith(job))
        go_to("button[value=pause]")
        browser.picture("unlocked")
        browser.enter_and_load()
        self.assertEqual(cli("show", job)["state"], "paused")
        go_to("button[value=resume]")
        browser.enter_and_load()
        self.assertIn(cli("show", job)["state"], ("queued", "running"))
        go_to("summary")
        browser.key("Enter", 13, "\r")
        go_to("button[value=cancel]")
        browser.enter_and_load()
        self.assertEqual(cli("show", job)["state"], "cancelled")
        self.assertEqual(browser.run("document.querySelectorAll('main form').length"), 0)
        go_to("footer button")
        browser.enter_and_load()
        self.assertEqual(browser.run("document.querySelectorAll('input[type=password]').length"), 1)


if __name__ == "__main__":
    if CHROMIUM is None:
        print("skipped: no chromium here (apt-get install chromium)")
        sys.exit(77)
    unittest.main()
