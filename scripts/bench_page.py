"""How long the page keeps a browser from answering, with 1 GB of logs (`bench-page.sh`).

Chromium shows the logs of a running cluster, one of which is made here: it is scrolled, searched to its beginning,
followed while it grows, and its longest line opened. A browser reports each task that takes more than 50 ms; the longest
one must stay below 100 ms.

    bench_page.py LINK LOGS [MIB]     the page's link with its token, and the directory of the cluster's logs
"""

import datetime
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT_MS = 100
LINE = "INFO step {number}: loss 0.{number}, {rest}\n"


def stamped(at: float) -> str:
    when = datetime.datetime.fromtimestamp(at, datetime.UTC)
    return when.strftime("%Y-%m-%dT%H:%M:%S.") + f"{when.microsecond // 1000:03}Z "


def write(path: Path, mib: int) -> None:
    """Writes a log with a word at its beginning, an error now and then, and a line of 1 MiB at its end."""
    begin = time.time() - 3600
    with path.open("w") as log:
        log.write(f"{stamped(begin)}the needle\n")
        for block in range(mib):
            time_of = stamped(begin + 1 + 3500 * block / mib)
            lines = [time_of + LINE.format(number=number, rest="x" * (number % 80)) for number in range(9000)]
            lines[0] = f"{time_of}ERROR number {block} of the block\n"
            log.write("".join(lines))
        log.write(stamped(begin + 3599) + "y" * (1 << 20) + "\n")


class Browser:
    """Chromium over WebDriver."""

    def __init__(self) -> None:
        self.driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
        assert self.driver.stdout
        said = next(line for line in self.driver.stdout if "successfully on port" in line)
        self.base = f"http://127.0.0.1:{said.rsplit(' ', 1)[1].strip().rstrip('.')}/session"
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        options = {"browserName": "chrome", "goog:chromeOptions": {"args": arguments}}
        session = self.ask("", {"capabilities": {"alwaysMatch": options}})
        self.base += f"/{session['sessionId']}"

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(self.base + path, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def script(self, text: str) -> Any:
        return self.ask("/execute/sync", {"script": text, "args": []})

    def wait_for(self, expression: str, seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while not self.script(f"return Boolean({expression})"):
            if time.monotonic() > end:
                raise SystemExit(f"bench_page: not within {seconds} s: {expression}")
            time.sleep(0.05)

    def end(self) -> None:
        request = urllib.request.Request(self.base, method="DELETE")
        urllib.request.urlopen(request, timeout=60).close()
        self.driver.terminate()
        self.driver.wait()


LINES = "document.querySelectorAll('#logs .line')"
BOX = "document.querySelector('#logs .lines')"
OBSERVE = """
window.longest = 0;
new PerformanceObserver((list) => list.getEntries().forEach((task) => { longest = Math.max(longest, task.duration); }))
    .observe({ type: "longtask" });
"""


def search(browser: Browser, text: str) -> None:
    browser.script(
        "const field = document.querySelector('#logs input[type=search]');"
        f"field.value = '{text}'; field.dispatchEvent(new Event('input'))"
    )


def main() -> int:
    link, logs = sys.argv[1], Path(sys.argv[2])
    mib = int(sys.argv[3]) if len(sys.argv) > 3 else 1024
    log = logs / "large.log"
    write(log, mib)
    browser = Browser()
    worst = 0.0

    def measured(what: str, act: Callable[[], None]) -> None:
        nonlocal worst
        browser.script("window.longest = 0")
        began = time.monotonic()
        act()
        took = time.monotonic() - began
        longest = browser.script("return longest")
        worst = max(worst, longest)
        tasks = f"longest task {longest:.0f} ms" if longest else "no task above 50 ms"
        print(f"{what:24} {took:5.1f} s, {tasks}", flush=True)

    def show() -> None:
        browser.script("document.querySelector('#logs').scrollIntoView({ block: 'center' })")
        browser.wait_for(f"{LINES}.length >= 60")

    def scroll() -> None:
        for _ in range(20):
            first = browser.script(f"return {LINES}[0].dataset.line")
            browser.script(f"{BOX}.scrollTop = 0")
            browser.wait_for(f"{LINES}[0].dataset.line !== '{first}'")

    def find() -> None:
        search(browser, "the needle")
        browser.wait_for(
            "/1 line found.*all was searched/.test(document.querySelector('#logs [role=status]').textContent)"
        )

    def errors() -> None:
        search(browser, "")
        browser.script(
            "const field = document.querySelector('#logs select');"
            "field.value = 'error'; field.dispatchEvent(new Event('change'))"
        )
        browser.wait_for(f"{LINES}.length >= 60")

    def follow() -> None:
        browser.script(
            "const field = document.querySelector('#logs select');"
            "field.value = ''; field.dispatchEvent(new Event('change'))"
        )
        with log.open("a") as growing:
            for _ in range(100):
                now = stamped(time.time())
                growing.write(
                    "".join(now + LINE.format(number=number, rest="z" * 60) for number in range(200))
                )
                growing.flush()
                time.sleep(0.1)
            growing.write(f"{stamped(time.time())}the last line\n")
        browser.wait_for(f"[...{LINES}].some((line) => line.textContent.includes('the last line'))")

    def whole() -> None:
        search(browser, "yyyyyyyy")
        browser.wait_for("document.querySelector('#logs .more')")
        browser.script("document.querySelector('#logs .more').click()")
        browser.wait_for("document.querySelector('#logs .whole')?.textContent.length >= 1048576")
        time.sleep(1)

    try:
        browser.ask("/url", {"url": link})
        browser.wait_for("document.querySelector('#worker-table tbody button')")
        browser.script(OBSERVE)
        measured("the page itself", lambda: time.sleep(5))
        measured("the newest lines", show)
        measured("20 pages of older ones", scroll)
        measured(f"a word {mib} MiB before", find)
        measured("errors alone", errors)
        measured("2000 new lines a second", follow)
        measured("a line of 1 MiB opened", whole)
    finally:
        browser.end()
    if worst >= LIMIT_MS:
        print(f"bench_page: a task took {worst:.0f} ms, and {LIMIT_MS} ms is the limit", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
