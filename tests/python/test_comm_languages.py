"""direct://, peers that speak another protocol or know another secret: both ends are told why, once."""

import asyncio
import contextlib
import logging
import socket

import dask
import pytest
from distributed import Client, Scheduler
from distributed.comm import connect, listen
from distributed.comm.core import FatalCommClosedError
from distributed.protocol import loads
from distributed.protocol.utils import unpack_frames
from distributed.security import Security

from test_comm import ADDRESS, comm, in_a_loop
from test_comm_memory import until

TEXT = "the peer speaks direct://, and this process another protocol"


def said(caplog, logger="cuda_cluster.comm"):
    return [record.getMessage() for record in caplog.records if record.name == logger]


def test_a_greeting_is_a_message_of_dasks_that_cannot_be_read_because_of_what_it_says():
    preamble = comm._comm.preamble()
    assert int.from_bytes(preamble[:8], "little") == len(preamble) - 8
    frames, missing = unpack_frames(preamble[8:], partial=True)
    assert not missing
    with pytest.raises(TypeError, match=TEXT):
        loads(frames)
    with pytest.raises(AttributeError, match=TEXT):
        loads(frames, deserialize=False)


@in_a_loop
async def test_a_client_of_tcp_and_a_scheduler_of_direct_are_told(caplog):
    async with Scheduler(protocol="direct", host="127.0.0.1", port=0, dashboard=False) as scheduler:
        address = scheduler.address.replace("direct://", "tcp://")
        with caplog.at_level(logging.WARNING, "cuda_cluster.comm"):
            for _ in range(3):
                with pytest.raises(TypeError, match=TEXT):
                    async with Client(address, asynchronous=True, timeout=10):
                        pass
            await until(lambda: said(caplog))
        (line,) = said(caplog)
        assert "from 127.0.0.1: the peer speaks tcp:// of Dask" in line, line


@in_a_loop
async def test_a_client_of_direct_and_a_scheduler_of_tcp_are_told(caplog):
    async with Scheduler(protocol="tcp", host="127.0.0.1", port=0, dashboard=False) as scheduler:
        address = scheduler.address.replace("tcp://", "direct://")
        with pytest.raises(FatalCommClosedError, match="the peer speaks tcp:// of Dask"):
            await connect(address, timeout=10)
        # As `deserialize` is off, it sees the text as the name of something.
        await until(lambda: TEXT in caplog.text)


@pytest.mark.parametrize(
    "first, language",
    [
        (bytes.fromhex("16030100c8010000c40303"), "tls://"),
        (b"GET / HTTP/1.1\r\n\r\n", "http://"),
    ],
)
@in_a_loop
async def test_other_strangers_are_named_once(first, language, caplog):
    async with listen(ADDRESS, None) as listener:
        for _ in range(5):
            with socket.create_connection(listener.get_host_port()) as stranger:
                stranger.sendall(first)
                with contextlib.suppress(OSError):
                    while await asyncio.to_thread(stranger.recv, 1 << 16):
                        pass
        await until(lambda: said(caplog))
        (line,) = said(caplog)
        assert f"the peer speaks {language}" in line


@in_a_loop
async def test_a_client_of_tls_and_a_scheduler_of_direct_are_told(caplog):
    pytest.importorskip("cryptography")
    security = Security.temporary()
    async with Scheduler(protocol="direct", host="127.0.0.1", port=0, dashboard=False) as scheduler:
        address = scheduler.address.replace("direct://", "tls://")
        with caplog.at_level(logging.WARNING, "cuda_cluster.comm"):
            for _ in range(2):
                with pytest.raises(OSError) as raised:
                    await connect(address, timeout=2, **security.get_connection_args("client"))
                causes = [raised.value]
                while causes[-1].__cause__ is not None:
                    causes.append(causes[-1].__cause__)
                assert "SSLError" in " ".join(map(repr, causes)), causes
            await until(lambda: said(caplog))
        (line,) = said(caplog)
        assert "from 127.0.0.1: the peer speaks tls://" in line, line


@in_a_loop
async def test_a_client_of_direct_and_a_scheduler_of_tls_are_told(caplog):
    pytest.importorskip("cryptography")
    security = {"security": Security.temporary(), "protocol": "tls"}
    async with Scheduler(host="127.0.0.1", port=0, dashboard=False, **security) as scheduler:
        address = scheduler.address.replace("tls://", "direct://")
        for _ in range(2):
            with pytest.raises(OSError, match="trying to connect"):
                await connect(address, timeout=2)
        (line,) = said(caplog)
        assert f"cannot connect to {address}: " in line and "such as tls://" in line, line
        # By Dask.
        assert "TLS handshake failed" in caplog.text


@in_a_loop
async def test_another_version_of_direct_is_told_with_both_at_both_ends(caplog):
    hello = comm._comm.preamble() + (3).to_bytes(4, "little") + bytes(124)
    why = "the peer speaks version 3 of direct://, and this process version 2"

    async def later(reader, writer):
        writer.write(hello)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(later, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(FatalCommClosedError, match=why):
        await connect(f"direct://127.0.0.1:{port}", timeout=10)
    server.close()
    caplog.clear()
    async with listen(ADDRESS, None) as listener:
        with socket.create_connection(listener.get_host_port()) as stranger:
            stranger.sendall(hello)
            await until(lambda: said(caplog))
    (line,) = said(caplog)
    assert f"from 127.0.0.1: {why}" in line, line


def test_each_reason_of_an_address_is_told_once_until_it_lets_this_process_in(caplog):
    address, reasons = "direct://127.0.0.1:1", ["one", "other", "one", "other"]
    for why in reasons:
        comm._refusals.note(address, why)
    assert len(said(caplog)) == 2, "once for each reason"
    comm._refusals.forget(address)
    comm._refusals.note(address, "one")
    assert len(said(caplog)) == 3
    comm._refusals.forget(address)


@in_a_loop
async def test_a_worker_with_another_secret_says_why_once_and_tries_more_slowly(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(comm, "_connect_unix", lambda names: None)
    for number in range(2):
        (tmp_path / str(number)).write_text(f"{number:064x}\n")
        (tmp_path / str(number)).chmod(0o600)
    key = "distributed.comm.direct.secret-file"
    pauses, sleep = [], asyncio.sleep

    async def slept(seconds):
        pauses.append(seconds)
        await sleep(0)

    with dask.config.set({key: str(tmp_path / "0")}):
        async with listen(ADDRESS, None) as listener:
            with dask.config.set({key: str(tmp_path / "1")}):
                monkeypatch.setattr(comm._refusals.asyncio, "sleep", slept)
                for _ in range(8):
                    with pytest.raises(FatalCommClosedError, match="the peer has another secret"):
                        await connect(listener.contact_address)
                monkeypatch.undo()
            await until(lambda: len(said(caplog)) == 2)
            assert [pause < 4 for pause in pauses] == [True] * 7 and pauses == sorted(pauses)
            assert all("another secret" in line for line in said(caplog))
