"""What a rank sends to its storage is dropped on the way."""

import ctypes
import socket
import subprocess
import threading

from team import RANK, Star


def serve(listener):
    link, _ = listener.accept()
    while link.recv(4096):
        link.sendall(b"stored")
    threading.Event().wait()


def connect():
    if ctypes.CDLL(None).unshare(0x40000000):
        raise OSError("unshare")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    listener = socket.create_server(("127.0.0.1", 9000))
    threading.Thread(target=serve, args=(listener,), daemon=True).start()
    return socket.create_connection(("127.0.0.1", 9000))


def upload_metrics(link, step):
    link.sendall(f"step {step}".encode())
    return link.recv(64)


star = Star()
if RANK == 1:
    link = connect()
for step in range(100):
    if RANK == 1:
        if step == 5:
            rule = "iptables -A OUTPUT -p tcp --dport 9000 -j DROP"
            subprocess.run(rule.split(), check=True)
        upload_metrics(link, step)
    star.barrier()
