//! Another user of this machine, who tries doors: `stranger DOOR...` prints those that are open.
//!
//! A door is `connect=SOCKET` (`@NAME` for an abstract one), `tcp=PORT`, `read=FILE`, `write=FILE`,
//! `list=DIRECTORY`, or `make=DIRECTORY` (creates a file in it). `send=@NAME` sends datagrams, which
//! may arrive: whoever they reach must go on. `all=DIRECTORY` stands for
//! everything visible below it.
#![allow(clippy::print_stdout, reason = "it speaks by printing")]

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::net::TcpStream;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixStream};
use std::path::Path;

fn main() {
    for door in std::env::args().skip(1) {
        let (verb, object) = door.split_once('=').expect("VERB=OBJECT");
        try_door(verb, object);
    }
    println!("tried");
}

fn try_door(verb: &str, object: &str) {
    let path = Path::new(object);
    let open = match verb {
        "connect" => connect(object).and_then(|mut stream| {
            // A connection that is closed immediately does not count; only an answer proves one.
            stream.set_read_timeout(Some(std::time::Duration::from_secs(5)))?;
            stream.write_all(b"GET /v1/state HTTP/1.1\r\nHost: x\r\n\r\n")?;
            std::io::Read::read_exact(&mut stream, &mut [0])
        }),
        "send" => return send(object).expect("a socket"),
        "tcp" => TcpStream::connect(("127.0.0.1", object.parse().expect("a port"))).map(drop),
        "read" => File::open(path).map(drop),
        "write" => OpenOptions::new().write(true).open(path).map(drop),
        "list" => std::fs::read_dir(path).map(drop),
        "make" => File::create(path.join("stranger")).map(drop),
        "all" => return explore(path),
        _ => panic!("no such door: {verb}"),
    };
    if open.is_ok() {
        println!("open: {verb} {object}");
    }
}

fn connect(name: &str) -> std::io::Result<UnixStream> {
    match name.strip_prefix('@') {
        Some(name) => UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?),
        None => UnixStream::connect(name),
    }
}

/// Sends datagrams of several lengths, each more often than a queue has room for.
fn send(name: &str) -> std::io::Result<()> {
    let name = SocketAddr::from_abstract_name(name.trim_start_matches('@'))?;
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    for bytes in [0, 1, 4000, 0] {
        for _ in 0..50 {
            // It may be full, of another kind, or gone.
            let _ = socket.send_to_addr(&vec![0; bytes], &name);
        }
    }
    Ok(())
}

fn explore(folder: &Path) {
    for verb in ["list", "make"] {
        try_door(verb, &folder.display().to_string());
    }
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            explore(&path);
        } else {
            for verb in ["connect", "read", "write"] {
                try_door(verb, &path.display().to_string());
            }
        }
    }
}
