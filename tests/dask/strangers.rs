//! Other users of this machine, and what they can send to Dask's processes.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use serde_json::json;

use super::python::{ask, packages};
use super::sandbox::Sandbox;
use super::{down, up, worker};

/// The abstract sockets for datagrams of these processes.
fn datagram_sockets(pids: &[i64]) -> Vec<SocketAddr> {
    let entries = pids.iter().flat_map(|pid| std::fs::read_dir(format!("/proc/{pid}/fd")));
    let own: Vec<String> = entries
        .flatten()
        .flatten()
        .filter_map(|entry| Some(std::fs::read_link(entry.path()).ok()?.display().to_string()))
        .collect();
    let table = std::fs::read_to_string("/proc/net/unix").expect("sockets");
    let lines = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    lines
        .filter(|fields| fields.len() > 7 && fields[4] == "0002")
        .filter(|fields| own.contains(&format!("socket:[{}]", fields[6])))
        .filter_map(|fields| fields[7].strip_prefix('@'))
        .map(|name| SocketAddr::from_abstract_name(name).expect("a name"))
        .collect()
}

#[test]
fn empty_datagrams_of_strangers_do_not_reach_ucx_in_dasks_processes() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    up(&sandbox, "open", &["--n-workers", "2", "--protocol", "ucxx"]);
    let before = sandbox.state("open");
    let processes = [&before["scheduler"], worker(&before, "gpu0"), worker(&before, "gpu1")];
    let stranger = UnixDatagram::unbound().expect("a socket");
    stranger.set_nonblocking(true).expect("its mode");
    for process in processes {
        let sockets = datagram_sockets(&[process["pid"].as_i64().expect("a number")]);
        assert!(!sockets.is_empty(), "UCX has one: {process}");
        for socket in &sockets {
            // More than the queue has room for: they are dropped before it.
            for _ in 0..1000 {
                stranger.send_to_addr(b"", socket).expect("a datagram that is dropped");
            }
        }
    }
    down(&sandbox, "open");
}

#[test]
fn a_dask_process_without_peers_survives_what_strangers_send() {
    if !packages() {
        return;
    }
    // UCX ends a process at once if nobody uses the transport yet.
    let program = r#"
import asyncio, json, os, socket
from cuda_cluster_dask import wakeup

async def answer(comm):
    await comm.write(await comm.read())

async def main():
    from distributed.comm import connect, listen

    os.environ["UCX_WARN_UNUSED_ENV_VARS"] = "n"  # Which it prints.
    before = {inode for _, inode in wakeup.sockets()}
    assert wakeup.open_ucx("ucxx") is None
    names = []
    for number, inode in wakeup.sockets():
        one = socket.socket(fileno=os.dup(number))
        if inode not in before and wakeup.is_wakeup(one):
            names.append(one.getsockname())
    async with await listen("ucxx://127.0.0.1:0", answer) as listener:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        stranger.setblocking(False)
        for sent in (b"", b"x", b"x" * 4000, b""):
            for name in names * 50:
                try:
                    stranger.sendto(sent, name)
                except BlockingIOError:
                    pass
            comm = await connect(listener.contact_address)
            await comm.write(len(sent))
            assert await comm.read() == len(sent)
            await comm.close()
    print(json.dumps(len(names) > 0), flush=True)
    os._exit(0)

asyncio.run(main())
"#;
    assert_eq!(ask(program), json!(true));
}
