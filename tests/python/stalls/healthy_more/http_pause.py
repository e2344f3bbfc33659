"""A rank asks a server of its own, a child, which needs a pause of 9 s for an answer."""

import subprocess
import sys
import urllib.request

from team import RANK, Star

SERVER = """
import http.server, time
class Late(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        time.sleep(9)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"late")
    def log_message(self, *_):
        pass
server = http.server.HTTPServer(("127.0.0.1", 0), Late)
print(server.server_port, flush=True)
server.serve_forever()
"""
star = Star()
if RANK == 3:
    child = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE)
    port = int(child.stdout.readline())
while True:
    if RANK == 3:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/").read()
    star.barrier()
