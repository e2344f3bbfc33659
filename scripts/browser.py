"""Chromium over WebDriver, for scripts that look at pages as people see them."""

import base64
import json
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any


class Browser:
    """A browser with one page, without a window."""

    def __init__(self) -> None:
        self.driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
        assert self.driver.stdout
        said = next(line for line in self.driver.stdout if "successfully on port" in line)
        self.base = f"http://127.0.0.1:{said.rsplit(' ', 1)[1].strip().rstrip('.')}/session"
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        options = {"browserName": "chrome", "goog:chromeOptions": {"args": arguments}}
        session = self.ask("", {"capabilities": {"alwaysMatch": options}})
        self.base += f"/{session['sessionId']}"

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self.base + path, data), timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, address: str) -> None:
        self.ask("/url", {"url": address})

    def script(self, text: str) -> Any:
        return self.ask("/execute/sync", {"script": text, "args": []})

    def wait_for(self, expression: str, seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while not self.script(f"return Boolean({expression})"):
            if time.monotonic() > end:
                raise SystemExit(f"not within {seconds} s: {expression}")
            time.sleep(0.05)

    def size(self, width: int, height: int) -> None:
        self.ask("/window/rect", {"width": width, "height": height})

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.ask("/screenshot")))

    def end(self) -> None:
        request = urllib.request.Request(self.base, method="DELETE")
        urllib.request.urlopen(request, timeout=60).close()
        self.driver.terminate()
        self.driver.wait()
