"""Rank 0 is a server of HTTP, which has an answer for the others after 9 s each."""

import http.server
import threading
import time
import urllib.request

from team import HOST, PORT, RANK, Star


class Late(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        time.sleep(9)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


star = Star()
if RANK == 0:
    server = http.server.ThreadingHTTPServer((HOST, PORT + 1), Late)
    threading.Thread(target=server.serve_forever, daemon=True).start()
star.barrier()
while True:
    if RANK:
        urllib.request.urlopen(f"http://{HOST}:{PORT + 1}/").read()
    star.barrier()
