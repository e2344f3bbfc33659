//! Causes in tasks of the native engine: `native_jobs CAUSE NAME` starts a cluster of that name, with four workers on a
//! simulated machine, and waits for its tasks.
//!
//! Not part of the workspace: `scripts/why_held_out.py` builds it with `rustc` against the library that is built already.

use std::error::Error;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Barrier, Mutex, RwLock};
use std::thread::sleep;
use std::time::Duration;

use cuda_cluster::cluster::{
    self, Client, Cluster, Context, FunctionError, Input, Registry, Remote,
};
use cuda_cluster::topology;

static TABLE: RwLock<Vec<u64>> = RwLock::new(Vec::new());
static CHANGES: Mutex<Option<Sender<u64>>> = Mutex::new(None);

/// Waits for a change of the configuration, for which nobody calls.
fn watch_config(_: &Context, _: &[Input]) -> Result<(), FunctionError> {
    let (sender, receiver): (Sender<u64>, Receiver<u64>) = channel();
    *CHANGES.lock().map_err(|_| "poisoned")? = Some(sender);
    receiver.recv()?;
    Ok(())
}

/// One of four parts that run at the same time: part 0 hears the others and then answers them.
fn join_ring(context: &Context, _: &[Input]) -> Result<(), FunctionError> {
    let (part, port): (u16, u16) = context.arguments()?;
    if part == 0 {
        let listener = TcpListener::bind(("127.0.0.1", port))?;
        let mut links = Vec::new();
        for _ in 0..3 {
            links.push(listener.accept()?.0);
        }
        for link in &mut links {
            link.write_all(b"!")?;
        }
        return Ok(());
    }
    let mut link = loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(link) => break link,
            Err(_) => sleep(Duration::from_millis(50)),
        }
    };
    link.read_exact(&mut [0])?;
    Ok(())
}

/// Waits for the end of a child that reads until the end of what this process still has open.
fn compress_block(_: &Context, _: &[Input]) -> Result<(), FunctionError> {
    let mut child = Command::new("gzip").stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?;
    let mut input = child.stdin.take().ok_or("no input")?;
    input.write_all(&[7; 1000])?;
    child.wait()?;
    drop(input);
    Ok(())
}

/// Wants to write while it still reads.
fn refresh_table(_: &Context, _: &[Input]) -> Result<(), FunctionError> {
    let table = TABLE.read().map_err(|_| "poisoned")?;
    if table.is_empty() {
        TABLE.write().map_err(|_| "poisoned")?.push(1);
    }
    Ok(())
}

fn functions() -> Registry {
    let barrier = Barrier::new(3);
    let mut registry = Registry::new();
    registry
        .add("watch_config", watch_config)
        .add("join_ring", join_ring)
        .add("compress_block", compress_block)
        .add("refresh_table", refresh_table)
        .add("exchange_rows", move |_: &Context, _: &[Input]| {
            barrier.wait();
            Ok(())
        })
        .add("collect", |_: &Context, _: &[Input]| Ok(()));
    registry
}

/// Submits the tasks of a cause.
fn tasks(client: &Client, cause: &str) -> Result<Vec<Remote>, Box<dyn Error>> {
    let on = |function: &str, worker: &str| client.task(function).on(worker).submit();
    let last = match cause {
        "native_gang" => {
            let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
            let watch = on("watch_config", "gpu3")?;
            sleep(Duration::from_millis(300));
            let mut all = vec![watch];
            for part in 0..4u16 {
                let worker = format!("gpu{part}");
                all.push(client.task("join_ring").arguments(&(part, port)).on(&worker).submit()?);
            }
            return Ok(all);
        }
        "native_child_input" => on("compress_block", "gpu0"),
        "native_upgrade" => on("refresh_table", "gpu1"),
        "native_barrier" => {
            let three = (0..3).map(|_| on("exchange_rows", "gpu2"));
            return Ok(three.collect::<Result<_, _>>()?);
        }
        other => return Err(format!("no cause is called {other}").into()),
    };
    let last = last?;
    let collected = client.task("collect").inputs(&[&last]).on("gpu3").submit()?;
    Ok(vec![last, collected])
}

fn main() -> Result<ExitCode, Box<dyn Error>> {
    // Must come first: this process may have been started as one of the cluster's.
    if let Some(code) = cluster::dispatch_with(functions) {
        return Ok(code);
    }
    let mut words = std::env::args().skip(1);
    let (cause, name) = words.next().zip(words.next()).ok_or("native_jobs CAUSE NAME")?;
    let machine = topology::parse(topology::builtin("dgx-h100").ok_or("a built-in machine")?)?;
    let threads = if cause == "native_barrier" { 2 } else { 1 };
    let cluster = Cluster::builder().name(name.parse()?).simulate(machine).workers(4);
    let cluster = cluster.set("threads", threads).launch_blocking()?;
    let client = cluster.client()?;
    let tasks = tasks(&client, &cause)?;
    client.wait(&tasks)?;
    cluster.stop();
    Ok(ExitCode::SUCCESS)
}
