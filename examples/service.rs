//! A service that owns a cluster: it answers requests over a Unix socket, one line each, and ends
//! with its cluster, or its cluster with it.
//!
//! `cargo run --example service /tmp/service.sock` runs on a simulated DGX-1, so that it needs no
//! GPU; then `echo sum 1 2 3 | nc -NU /tmp/service.sock`, or `state`, `restart gpu0`, `stop`.
#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

use cuda_cluster::cluster::{self, Client, Cluster, Handle, LaunchFailure, Outcome};
use cuda_cluster::topology;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

type Failure = Box<dyn Error + Send + Sync>;

fn main() -> ExitCode {
    // Must come first, and before tokio has threads: this process may be one of the cluster's.
    if let Some(code) = cluster::dispatch() {
        return code;
    }
    let served = tokio::runtime::Runtime::new().map_err(Failure::from);
    match served.and_then(|runtime| runtime.block_on(serve())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            if let Some(hint) = error.downcast_ref().and_then(LaunchFailure::hint) {
                eprintln!("hint: {hint}");
            }
            ExitCode::FAILURE
        }
    }
}

async fn serve() -> Result<(), Failure> {
    let socket = std::env::args().nth(1).ok_or("service SOCKET")?;
    let mut terminated = signal(SignalKind::terminate())?;
    let mut interrupted = signal(SignalKind::interrupt())?;

    let machine = topology::parse(topology::builtin("dgx-1-v100").ok_or("a built-in machine")?)?;
    let wanted = Cluster::builder().name("service".parse()?).simulate(machine).workers(2);
    let cluster = wanted.set("supervision.grace", "5s").launch().await?;
    let client = Client::connect_async(cluster.paths().root()).await?;
    // An earlier instance that was killed has left its socket.
    let _ = std::fs::remove_file(&socket);
    let listener = UnixListener::bind(&socket)?;
    println!("listening");

    let (stop, mut stopped) = mpsc::channel(1);
    let outcome = loop {
        tokio::select! {
            connection = listener.accept() => {
                let (handle, client) = (cluster.handle().clone(), client.clone());
                let answered = answer(connection?.0, handle, client, stop.clone());
                tokio::spawn(async move {
                    if let Err(error) = answered.await {
                        eprintln!("a connection broke: {error}");
                    }
                });
            }
            // It may end by itself: a worker died too often, or somebody ran `cuda-cluster down`.
            outcome = cluster.wait() => break Some(outcome),
            _ = stopped.recv() => break None,
            _ = terminated.recv() => break None,
            _ = interrupted.recv() => break None,
        }
    };
    let _ = std::fs::remove_file(Path::new(&socket));
    drop(client);
    match outcome {
        None => {
            cluster.stop().await;
            println!("stopped");
            Ok(())
        }
        Some(Outcome::Stopped { degraded: None }) => {
            println!("the cluster was stopped");
            Ok(())
        }
        Some(Outcome::Stopped { degraded: Some(cause) } | Outcome::Failed(cause)) => {
            Err(format!("the cluster has ended: {cause}").into())
        }
        Some(other) => Err(format!("the cluster has ended: {other:?}").into()),
    }
}

/// Answers the requests of one connection.
async fn answer(
    mut stream: UnixStream,
    cluster: Handle,
    client: Client,
    stop: mpsc::Sender<()>,
) -> Result<(), Failure> {
    let (requests, mut answers) = stream.split();
    let mut requests = BufReader::new(requests).lines();
    while let Some(line) = requests.next_line().await? {
        let mut words = line.split_whitespace();
        let answer = match words.next() {
            Some("state") => state(&cluster).await,
            Some("sum") => sum(&client, words.map(str::parse).collect::<Result<_, _>>()?).await,
            Some("restart") => match cluster.restart(words.next().unwrap_or_default()).await {
                Ok(()) => Ok("it restarts".to_owned()),
                Err(error) => Err(error.into()),
            },
            Some("stop") => {
                stop.send(()).await?;
                Ok("it stops".to_owned())
            }
            _ => Err("one of: state, sum NUMBERS, restart WORKER, stop".into()),
        };
        let answer = answer.unwrap_or_else(|error| format!("error: {error}"));
        answers.write_all(format!("{answer}\n").as_bytes()).await?;
    }
    Ok(())
}

async fn state(cluster: &Handle) -> Result<String, Failure> {
    let state = cluster.state().await?;
    let workers = state.workers.iter().map(|worker| format!(" {} {}", worker.name, worker.state));
    Ok(format!("{}:{}", state.state, workers.collect::<String>()))
}

/// Adds numbers on the workers; other requests are answered meanwhile.
async fn sum(client: &Client, numbers: Vec<u64>) -> Result<String, Failure> {
    let mut values = Vec::new();
    for number in &numbers {
        values.push(client.put_value_async(number).await?);
    }
    let values: Vec<_> = values.iter().collect();
    Ok(client.submit("sum", &(), &values)?.value_async::<u64>().await?.to_string())
}
