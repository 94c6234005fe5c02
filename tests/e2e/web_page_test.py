"""The web page in headless Chromium: what a person sees and can do, with the keyboard alone, on a narrow screen, in the dark; no console errors.
Skipped (exit code 77) where there is no chromium. STATETAP_SCREENSHOTS=DIR keeps pictures."""
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

from browser import CHROMIUM, Browser

BIN = pathlib.Path(os.environ["STATETAP_BIN"])
ROOT = pathlib.Path(os.environ["STATETAP_ROOT"])
TOKEN = "a-token-of-the-test"


def setUpModule():
    global folder, server, http, browser, shown, report
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
    report = pathlib.Path(folder, "report.html")
    cli("stats", shown, "--html", report)
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


def keep_picture(name):
    if pictures := os.environ.get("STATETAP_SCREENSHOTS"):
        browser.picture(pathlib.Path(pictures, f"{name}.png"))


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

    def pages(self):
        return {"jobs": f"{http}/", "job": f"{http}/job?id={shown}", "samples": f"{http}/samples?job={shown}",
                "sample": f"{http}/sample?job={shown}&id=q3", "report": report.as_uri()}

    def test_console_errors_are_seen(self):
        browser.open(http + "/")
        browser.run("console.error('this test can fail'); document.body.append(Object.assign(new Image(), {src: '/no-image'}))")
        self.assertGreaterEqual(len(browser.errors), 2)  # the second: the policy of the page allows no image
        browser.errors.clear()

    def test_pages_fit_wide_and_narrow_light_and_dark(self):
        for name, url in self.pages().items():
            for width in (1200, 400):
                for dark in (False, True):
                    browser.look(width, dark=dark)
                    browser.open(url)
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
                    keep_picture(f"{name}-{width}-{'dark' if dark else 'light'}")

    def test_paper_shows_all_in_ink_on_white_whatever_the_screen(self):
        a4 = 718  # 210 mm less Chromium's margins, in CSS pixels
        for name, url in self.pages().items():
            browser.look(a4, dark=True, media="print")
            browser.open(url)
            with self.subTest(page=name):
                self.assertEqual(browser.run("""[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"""),
                                 ["rgb(27, 31, 36)", "rgb(255, 255, 255)"])
                # Nothing scrolls on paper.
                self.assertEqual(browser.run("""[...document.querySelectorAll("main *, .scroll *")].filter(e =>
                    e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 200))"""), [])
            keep_picture(f"{name}-print")

    def test_everything_is_reached_by_the_tab_key(self):
        for name, url in self.pages().items():
            browser.open(url)
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
        keep_picture("unlocked")
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
