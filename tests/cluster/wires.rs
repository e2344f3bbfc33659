//! `why --read` and `why --ras`: from logs, standard input and a made-up RAS.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::sandbox::{Said, Sandbox};

const FIRST: &str = "\
node-a:11:21 [0] NCCL INFO NET/IB : No device found.
node-a:11:21 [0] NCCL INFO NET/Socket : Using [0]eth0:192.0.2.1<0>
node-a:11:21 [0] NCCL INFO Channel 00/0 : 2[0] -> 0[0] [receive] via NET/Socket/0
node-a:11:21 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
node-a:11:22 [1] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/Socket/0
";

const SECOND: &str = "\
node-b:12:23 [0] NCCL INFO NET/Socket : Using [0]eth1:192.0.2.2<0>
node-b:12:23 [0] NCCL INFO Channel 00/0 : 2[0] -> 0[0] [send] via NET/Socket/0
";

fn file(sandbox: &Sandbox, name: &str, text: impl AsRef<[u8]>) -> String {
    let path: PathBuf = sandbox.runtime().join(name);
    fs::write(&path, text).expect("it is written");
    path.display().to_string()
}

#[test]
fn the_logs_of_two_ranks_say_which_wires_and_why_not_the_fast_ones() {
    let sandbox = Sandbox::new();
    let (first, second) = (file(&sandbox, "0.log", FIRST), file(&sandbox, "1.log", SECOND));
    let said = sandbox.run(&["why", "--read", &first, &second]);
    assert_eq!(said.code, 5, "{said}");
    for words in [
        "0→1: P2P/CUMEM",
        "1→2: NET/Socket (eth0)",
        "2→0: NET/Socket (eth1)",
        "* no RDMA device was found, so sockets are used between machines",
        "NCCL INFO NET/IB : No device found.",
    ] {
        assert!(said.stdout.contains(words), "{words:?} is missing: {said}");
    }
    let said = sandbox.run(&["why", "--read", &first, &second, "-o", "json"]);
    let answer: Value = serde_json::from_str(&said.stdout).expect("it is JSON");
    assert_eq!(answer["version"], 1);
    assert_eq!(answer["wires"]["causes"][0]["cause"], "no_rdma_device");
    assert_eq!(answer["wires"]["channels"].as_array().map(Vec::len), Some(3), "{said}");
}

#[test]
fn a_log_without_a_fault_is_zero_and_one_without_a_line_is_one() {
    let sandbox = Sandbox::new();
    let well = "n:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n";
    let said = sandbox.run(&["why", "--read", &file(&sandbox, "well.log", well)]);
    assert_eq!((said.code, said.stdout.contains("nothing wrong is said")), (0, true), "{said}");
    let odd = b"caf\xe9 \x1b]0;title\x07\nNCCL is fine\n";
    let said = sandbox.run(&["why", "--read", &file(&sandbox, "odd.log", odd)]);
    assert_eq!(said.code, 1, "{said}");
    assert_eq!(said.stdout, "no line of NCCL or UCX was found\n");
    let said = sandbox.run(&["why", "--read", "/no/such/log"]);
    assert_eq!(said.code, 2, "{said}");
    assert!(said.stderr.contains("cannot read log /no/such/log"), "{said}");
    let said = sandbox.run(&["why", "--read", "x", "--bundle", "y"]);
    assert_eq!(said.code, 2, "{said}");
}

#[test]
fn a_line_with_a_terminals_commands_is_shown_as_text() {
    let sandbox = Sandbox::new();
    let text = "n:1:2 [0] NCCL WARN Duplicate GPU detected \x1b]0;title\x07 : rank 0\n";
    let path = file(&sandbox, "odd.log", text);
    let said = sandbox.run(&["why", "--read", &path]);
    assert_eq!(said.code, 5, "{said}");
    assert!(!said.stdout.contains(['\x1b', '\x07']), "{said}");
}

#[test]
fn standard_input_is_a_file_too() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"))
        .args(["why", "--read", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut input = child.stdin.take().expect("a pipe");
    input.write_all(FIRST.as_bytes()).expect("it reads");
    drop(input);
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(5));
}

/// Answers one client as NCCL 2.29's RAS does.
fn ras(status: &'static str) -> (String, std::thread::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its address").to_string();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        let lines = BufReader::new(stream.try_clone().expect("a second end")).lines();
        for line in lines.map_while(Result::ok) {
            let answer = match line.as_str() {
                "CLIENT PROTOCOL 2" => "SERVER PROTOCOL 2\n",
                "VERBOSE STATUS" => status,
                _ => "OK\n",
            };
            stream.write_all(answer.as_bytes()).expect("it reads");
            if line == "VERBOSE STATUS" {
                break;
            }
        }
    });
    (address, server)
}

fn asked(sandbox: &Sandbox, address: &str) -> Said {
    sandbox.run(&["why", &format!("--ras={address}")])
}

#[test]
fn ras_is_asked_and_names_the_rank_that_is_behind() {
    let sandbox = Sandbox::new();
    let status = r#"{ "nccl_version": "2.29.1", "communicators": [ { "size": 2, "ranks": [
        { "rank": 0, "host": "n", "pid": 7, "collective_counts": { "AllReduce": 9 } },
        { "rank": 1, "host": "n", "pid": 8, "collective_counts": { "AllReduce": 8 } } ] } ] }"#;
    let (address, server) = ras(status);
    let said = asked(&sandbox, &address);
    server.join().expect("the server has ended");
    assert_eq!(said.code, 5, "{said}");
    assert!(said.stdout.contains("rank 1 (process 8 on n, GPU 0) has not launched"), "{said}");
    let said = asked(&sandbox, &address);
    assert_eq!(said.code, 1, "{said}");
    assert!(said.stderr.contains("nothing listens at"), "{said}");
    assert!(said.stderr.contains("NCCL_RAS_ENABLE"), "{said}");
}
