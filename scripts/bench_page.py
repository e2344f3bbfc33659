"""How long the page keeps a browser from answering, with 1 GB of logs and a million tasks (`bench-page.sh`).

Chromium shows the logs of a running cluster, which are made here: they are scrolled, searched to their beginning and
followed while they grow. With one process they are in one file, whose longest line is opened, too; with many they are
in a file for each, and before that the cluster's tasks are shown while they run and afterwards. A browser reports each
task of its own that takes more than 50 ms; the longest one must stay below 100 ms. The gap between two pictures is told,
too: it is longer on a machine that has something else to do.

    bench_page.py LINK LOGS MIB                              the page's link with its token, and where the logs are
    bench_page.py LINK LOGS MIB PROGRAM CLUSTER FILES TASKS  of many processes; the program runs the tasks
"""

import datetime
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from browser import Browser

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


LINES = "document.querySelectorAll('#logs .line')"
BOX = "document.querySelector('#logs .lines')"
OBSERVE = """
window.longest = window.gap = 0;
new PerformanceObserver((list) => list.getEntries().forEach((task) => { longest = Math.max(longest, task.duration); }))
    .observe({ type: "longtask" });
let last = performance.now();
const frame = (now) => { gap = Math.max(gap, now - last); last = now; requestAnimationFrame(frame); };
requestAnimationFrame(frame);
"""
SCROLL_THROUGH = """
window.scrolled = false;
const step = () => { scrollBy(0, 60); if (scrollY + innerHeight < document.body.scrollHeight - 1) requestAnimationFrame(step); else window.scrolled = true; };
scrollTo(0, 0); step();
"""
POINT = """
const canvas = document.querySelector('#tasks canvas'), box = canvas.getBoundingClientRect();
const at = { bubbles: true, clientX: box.left + 60 + Math.random() * (box.width - 60), clientY: box.top + Math.random() * box.height };
canvas.dispatchEvent(new PointerEvent('pointermove', at));
"""


def search(browser: Browser, text: str) -> None:
    browser.script(
        "const field = document.querySelector('#logs input[type=search]');"
        f"field.value = '{text}'; field.dispatchEvent(new Event('input'))"
    )


class Measure:
    """Acts in a browser, and says what kept it from answering meanwhile."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser
        self.worst = 0.0

    def __call__(self, what: str, act: Callable[[], None]) -> None:
        self.browser.script("window.longest = window.gap = 0")
        began = time.monotonic()
        act()
        took = time.monotonic() - began
        longest, gap = self.browser.script("return [longest, gap]")
        self.worst = max(self.worst, longest)
        tasks = f"longest task {longest:.0f} ms" if longest else "no task above 50 ms"
        print(f"{what:32} {took:5.1f} s, {tasks}, longest gap {gap:.0f} ms", flush=True)


def the_logs(browser: Browser, measured: Measure, files: Sequence[Path], mib: int) -> None:
    """Reads these logs, which have so many MiB together."""

    def show() -> None:
        browser.script("document.querySelector('#logs').scrollIntoView({ block: 'center' })")
        browser.wait_for(f"{LINES}.length >= 60")

    def scroll() -> None:
        for _ in range(20):
            # Of more new lines than anyone can read, the newest are shown alone, and there are none before.
            browser.wait_for(f"{LINES}.length >= 60")
            first = browser.script(f"return {LINES}[0].dataset.line")
            browser.script(f"{BOX}.scrollTop = 0")
            browser.wait_for(f"{LINES}.length && {LINES}[0].dataset.line !== '{first}'")

    def find() -> None:
        search(browser, "the needle")
        found = f"{len(files)} lines? found.*all was searched"
        said = "document.querySelector('#logs [role=status]').textContent"
        browser.wait_for(f"/{found}/.test({said})", 600)

    def level(least: str) -> None:
        search(browser, "")
        browser.script(
            "const field = document.querySelector('#logs select');"
            f"field.value = '{least}'; field.dispatchEvent(new Event('change'))"
        )
        browser.wait_for(f"{LINES}.length >= 60")

    def follow() -> None:
        level("")
        for _ in range(100):
            now = stamped(time.time())
            for file in files:
                lines = (LINE.format(number=number, rest="z" * 60) for number in range(200 // len(files)))
                with file.open("a") as growing:
                    growing.write("".join(now + line for line in lines))
            time.sleep(0.1)
        with files[0].open("a") as growing:
            growing.write(f"{stamped(time.time())}the last line\n")
        browser.wait_for(f"[...{LINES}].some((line) => line.textContent.includes('the last line'))")

    measured("the newest lines", show)
    measured("20 pages of older ones", scroll)
    measured(f"a word {mib} MiB before", find)
    measured("errors alone", lambda: level("error"))
    measured("2000 new lines a second", follow)


def one_process(browser: Browser, measured: Measure, logs: Path, mib: int) -> None:
    log = logs / "large.log"
    write(log, mib)

    def whole() -> None:
        search(browser, "yyyyyyyy")
        browser.wait_for("document.querySelector('#logs .more')")
        browser.script("document.querySelector('#logs .more').click()")
        browser.wait_for("document.querySelector('#logs .whole')?.textContent.length >= 1048576")
        time.sleep(1)

    measured("the page itself", lambda: time.sleep(5))
    the_logs(browser, measured, [log], mib)
    measured("a line of 1 MiB opened", whole)


def many_processes(browser: Browser, measured: Measure, logs: Path, mib: int, asked: Sequence[str]) -> None:
    program, cluster, tasks = asked[0], asked[1], int(asked[3])
    files = [logs / f"large-{number}.log" for number in range(int(asked[2]))]
    for file in files:
        write(file, max(1, mib // len(files)))

    def run() -> None:
        browser.script("document.querySelector('#tasks').scrollIntoView({ block: 'center' })")
        bench = [program, "bench", "tasks", cluster, "--shape", "flat", "--runs", "1", "--count", str(tasks)]
        subprocess.run(bench, check=True, stdout=subprocess.DEVNULL)
        said = "document.querySelector('#tasks [role=status]').textContent.replaceAll(',', '')"
        # Some more warm it up.
        browser.wait_for(f"Number({said}.match(/(\\d+) ran/)?.[1]) >= {tasks}")

    def point() -> None:
        browser.script("document.querySelector('#tasks [data-span=\"300\"]').click()")
        for _ in range(100):
            browser.script(POINT)

    def through() -> None:
        browser.script(SCROLL_THROUGH)
        browser.wait_for("window.scrolled")

    measured("the page itself", lambda: time.sleep(5))
    measured(f"while {tasks:,} tasks run", run)
    measured("they are pointed at", point)
    measured("the page scrolled through", through)
    the_logs(browser, measured, files, mib)


def main() -> int:
    link, logs, mib = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    browser = Browser()
    measured = Measure(browser)
    try:
        browser.open(link)
        browser.wait_for("document.querySelector('#worker-table tbody button')")
        browser.script(OBSERVE)
        if asked := sys.argv[4:]:
            many_processes(browser, measured, logs, mib, asked)
        else:
            one_process(browser, measured, logs, mib)
    finally:
        browser.end()
    if measured.worst >= LIMIT_MS:
        print(
            f"bench_page: a task took {measured.worst:.0f} ms, and {LIMIT_MS} ms is the limit",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
