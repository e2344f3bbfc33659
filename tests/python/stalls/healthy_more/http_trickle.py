"""A rank downloads from a slow server: a kilobyte every 0.7 s."""

import http.server
import threading
import time
import urllib.request

from team import RANK, Ring


class Trickle(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", str(20 * 1024))
        self.end_headers()
        for _ in range(20):
            time.sleep(0.7)
            self.wfile.write(bytes(1024))

    def log_message(self, *_):
        pass


def serve(server):
    server.serve_forever()


ring = Ring()
if RANK == 2:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Trickle)
    threading.Thread(target=serve, args=(server,), daemon=True).start()
while True:
    if RANK == 2:
        urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/data").read()
    ring.barrier()
