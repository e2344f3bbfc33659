"""The server that `outside_busy` and `outside_waits` ask; not a job."""

import http.server
import sys
import time


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/busy":
            end = time.monotonic() + 9
            while time.monotonic() < end:
                sum(range(10000))
        else:
            time.sleep(9)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
