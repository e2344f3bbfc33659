//! Terminals and readers that stall, clients that hang up, and the bytes of `run`.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::pty::{Winsize, openpty};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::sandbox::{Sandbox, eventually};
use crate::screen::Screen;

const MACHINE: [&str; 5] = ["--topology", "dgx-1-v100", "--simulate", "--n-workers", "2"];

/// Long, because other tests run at the same time.
const LONG: Duration = Duration::from_secs(60);

fn signal(child: &Child, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(child.id()).expect("a pid"));
    kill(pid, signal).expect("it lives");
}

/// The program in this sandbox, not started yet.
fn program(sandbox: &Sandbox, arguments: &[&str]) -> Command {
    // Whoever runs the tests under nohup ignores hang-ups, and so would it.
    let mut command = Command::new("env");
    command.args(["--default-signal=HUP", env!("CARGO_BIN_EXE_cuda-cluster")]);
    command.args(arguments).env("XDG_RUNTIME_DIR", sandbox.runtime()).stdin(Stdio::null());
    command.env_remove("CUDA_VISIBLE_DEVICES");
    command
}

fn up(name: &str) -> Vec<&str> {
    [&["up"], &MACHINE[..], &["--name", name]].concat()
}

fn until_ready(sandbox: &Sandbox, name: &str) {
    eventually("READY", LONG, || {
        sandbox.try_state(name).is_some_and(|state| state["state"] == "ready")
    });
}

/// What `run` writes to standard output when every rank runs a script, and its exit code.
fn bytes_of(sandbox: &Sandbox, flags: &[&str], script: &str) -> (Vec<u8>, Option<i32>) {
    let arguments = [&["run"], &MACHINE[..], flags, &["--", "sh", "-c", script]].concat();
    let output = program(sandbox, &arguments).stderr(Stdio::inherit()).output().expect("it runs");
    (output.stdout, output.status.code())
}

#[test]
fn clients_that_hang_up_do_not_end_a_foreground_cluster() {
    let sandbox = Sandbox::new();
    let mut running = sandbox.spawn(&up("calm"));
    until_ready(&sandbox, "calm");
    let socket = sandbox.runtime().join("cuda-cluster/calm/control.sock");
    for at in 0..300 {
        let mut stream = UnixStream::connect(&socket).expect("somebody listens");
        let request = "GET /v1/plan HTTP/1.1\r\nhost: cuda-cluster\r\n\r\n";
        let sent = if at % 3 == 0 { &request[..at % request.len()] } else { request };
        stream.write_all(sent.as_bytes()).expect("sent");
    }
    assert_eq!(sandbox.state("calm")["state"], "ready");
    running.signal(Signal::SIGTERM);
    let said = running.wait();
    assert_eq!(said.code, 128 + 15, "{said}");
    sandbox.assert_nothing_is_left();
}

#[test]
fn a_terminal_that_is_stopped_stops_nobody_but_its_reader() {
    let sandbox = Sandbox::new();
    let size = Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
    let terminal = openpty(Some(&size), None).expect("a terminal");
    let mut master = File::from(terminal.master);
    let end = || Stdio::from(terminal.slave.try_clone().expect("a descriptor"));
    let mut command = program(&sandbox, &up("stalled"));
    command.stdin(end()).stdout(end()).stderr(end());
    let mut running = command.spawn().expect("it starts");
    until_ready(&sandbox, "stalled");
    // Ctrl-S; nothing is read either.
    master.write_all(&[0x13]).expect("typed");
    for _ in 0..3 {
        let dead = sandbox.state("stalled")["workers"][0]["pid"].as_u64().expect("a pid");
        sandbox.kill(dead);
        eventually("its worker is back, and somebody answers", LONG, || {
            let state = sandbox.state("stalled");
            state["state"] == "ready" && state["workers"][0]["pid"] != dead
        });
    }
    signal(&running, Signal::SIGTERM);
    let status = running.wait().expect("it ends");
    assert_eq!(status.code(), Some(128 + 15));
    sandbox.assert_only_the_causes_are_left("stalled");
}

#[test]
fn a_terminal_that_goes_away_takes_its_cluster_along() {
    let sandbox = Sandbox::new();
    let terminal = openpty(None, None).expect("a terminal");
    let end = || Stdio::from(terminal.slave.try_clone().expect("a descriptor"));
    let mut command = program(&sandbox, &up("hangup"));
    command.stdin(end()).stdout(end()).stderr(end());
    let mut running = command.spawn().expect("it starts");
    until_ready(&sandbox, "hangup");
    drop(terminal.master);
    signal(&running, Signal::SIGHUP);
    assert_eq!(running.wait().expect("it ends").code(), Some(128 + 1));
    sandbox.assert_nothing_is_left();
}

#[test]
fn under_nohup_a_cluster_outlives_its_terminal() {
    let sandbox = Sandbox::new();
    let mut command = std::process::Command::new("nohup");
    command.arg(env!("CARGO_BIN_EXE_cuda-cluster")).args(up("kept"));
    command.env("XDG_RUNTIME_DIR", sandbox.runtime());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut running = command.spawn().expect("it starts");
    until_ready(&sandbox, "kept");
    signal(&running, Signal::SIGHUP);
    signal(&running, Signal::SIGHUP);
    assert_eq!(sandbox.state("kept")["state"], "ready");
    assert!(running.try_wait().expect("its status").is_none(), "it goes on");
    assert_eq!(sandbox.run(&["down", "kept"]).code, 0);
    assert_eq!(running.wait().expect("it ends").code(), Some(0));
    sandbox.assert_nothing_is_left();
}

#[test]
fn a_killed_owner_takes_its_cluster_along() {
    let sandbox = Sandbox::new();
    let mut running = sandbox.spawn(&up("orphan"));
    until_ready(&sandbox, "orphan");
    running.signal(Signal::SIGKILL);
    running.wait();
    sandbox.assert_nothing_is_left();
}

#[test]
fn a_reader_that_stalls_does_not_keep_a_run_from_ending() {
    let sandbox = Sandbox::new();
    for number in [Signal::SIGTERM, Signal::SIGINT] {
        let arguments = [&["run"], &MACHINE[..], &["--name", "stall", "--", "yes"]].concat();
        let mut command = program(&sandbox, &arguments);
        let mut running =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
        until_ready(&sandbox, "stall");
        signal(&running, number);
        let status = running.wait().expect("it ends, though nobody reads");
        assert_eq!(status.code(), Some(128 + number as i32));
        sandbox.assert_nothing_is_left();
    }
}

#[test]
fn a_rank_that_fails_stops_the_others_though_nobody_reads() {
    let sandbox = Sandbox::new();
    let script = "if [ $RANK = 1 ]; then sleep 1; echo dying words; exit 7; fi; exec yes";
    let arguments =
        [&["run"], &MACHINE[..], &["--name", "fails", "--", "sh", "-c", script]].concat();
    let mut command = program(&sandbox, &arguments);
    let mut running = command.stdout(Stdio::piped()).spawn().expect("it starts");
    until_ready(&sandbox, "fails");
    eventually("no rank is left", LONG, || {
        // The supervisor, its guardian and `run` wait for the reader.
        sandbox.pids().len() <= 3
    });
    let mut bytes = Vec::new();
    running.stdout.take().expect("piped").read_to_end(&mut bytes).expect("read");
    assert_eq!(running.wait().expect("it ends").code(), Some(7));
    let text = String::from_utf8(bytes).expect("text");
    assert_eq!(text.matches("dying words\n").count(), 1, "the last words come, too");
}

#[test]
fn what_ranks_write_comes_byte_for_byte() {
    let sandbox = Sandbox::new();
    let (text, code) = bytes_of(&sandbox, &[], "printf hello");
    assert_eq!((text.as_slice(), code), (&b"hellohello"[..], Some(0)));
    let (text, _) = bytes_of(&sandbox, &["--prefix"], "printf 'a\\nb'");
    let mut lines: Vec<&[u8]> = text.split_inclusive(|byte| *byte == b'\n').collect();
    lines.sort_unstable();
    let wanted = [&b"[gpu0] a\n"[..], b"[gpu0] b\n", b"[gpu3] a\n", b"[gpu3] b\n"];
    assert_eq!(lines, wanted, "{}", String::from_utf8_lossy(&text));
    let (text, _) = bytes_of(&sandbox, &[], "[ $RANK = 0 ] && printf '\\377\\000\\376\\n'; true");
    assert_eq!(text, b"\xff\0\xfe\n");
    // Lines are complete, and none is missing or duplicated.
    let (text, _) = bytes_of(&sandbox, &[], "seq 1 300000");
    let mut lines: Vec<u64> = String::from_utf8(text)
        .expect("text")
        .lines()
        .map(|line| line.parse().expect("a whole line"))
        .collect();
    lines.sort_unstable();
    assert!(lines.iter().copied().eq((1..=300_000).flat_map(|number| [number, number])));
    // A line without an end is longer than any buffer on the way.
    let script = "[ $RANK = 1 ] && head -c 100000000 /dev/zero | tr '\\0' x; true";
    let (text, _) = bytes_of(&sandbox, &[], script);
    assert_eq!(text.len(), 100_000_000);
    sandbox.assert_nothing_is_left();
}

#[test]
fn the_two_streams_of_a_rank_stay_apart_and_in_order() {
    let sandbox = Sandbox::new();
    let script = "for i in 1 2 3; do echo out $i; echo err $i >&2; done";
    let one = ["run", "--topology", "dgx-1-v100", "--simulate", "--n-workers", "1"];
    let arguments = [&one[..], &["--", "sh", "-c", script]].concat();
    let apart = program(&sandbox, &arguments).output().expect("it runs");
    assert_eq!(String::from_utf8_lossy(&apart.stdout), "out 1\nout 2\nout 3\n");
    assert!(String::from_utf8_lossy(&apart.stderr).contains("err 1\nerr 2\nerr 3\n"));
    let (mut reader, writer) = std::io::pipe().expect("a pipe");
    let mut together = program(&sandbox, &arguments);
    together.stdout(writer.try_clone().expect("a descriptor")).stderr(writer);
    let mut running = together.spawn().expect("it starts");
    drop(together);
    let mut text = String::new();
    reader.read_to_string(&mut text).expect("read");
    assert_eq!(running.wait().expect("it ends").code(), Some(0));
    assert!(text.contains("out 1\nerr 1\nout 2\nerr 2\nout 3\nerr 3\n"), "{text}");
}

#[test]
fn a_slow_reader_gets_every_byte() {
    let sandbox = Sandbox::new();
    let arguments = [&["run"], &MACHINE[..], &["--", "seq", "1", "100000"]].concat();
    let mut command = program(&sandbox, &arguments);
    let mut running = command.stdout(Stdio::piped()).spawn().expect("it starts");
    let mut stdout = running.stdout.take().expect("piped");
    let (mut total, mut buffer) = (0, vec![0; 4 << 10]);
    while let Ok(length @ 1..) = stdout.read(&mut buffer) {
        total += length;
        // The ranks have ended long before the last byte is read.
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(running.wait().expect("it ends").code(), Some(0));
    assert_eq!(total, 2 * 588_895, "seq 1 100000 has 588,895 bytes");
    sandbox.assert_nothing_is_left();
}

#[test]
fn a_reader_that_goes_away_ends_the_run_as_a_pipe_ends_a_writer() {
    let sandbox = Sandbox::new();
    let arguments = [&["run"], &MACHINE[..], &["--", "yes"]].concat();
    let mut command = program(&sandbox, &arguments);
    let mut running =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let mut stdout = running.stdout.take().expect("piped");
    stdout.read_exact(&mut [0; 1000]).expect("output");
    drop(stdout);
    let output = running.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(128 + 13));
    assert_eq!(String::from_utf8_lossy(&output.stderr).matches("error:").count(), 0);
    sandbox.assert_nothing_is_left();
}

#[test]
fn an_output_that_is_full_is_an_error_and_ends_the_run() {
    let sandbox = Sandbox::new();
    let full = || File::options().write(true).open("/dev/full").expect("a full disk");
    // The second ends before anybody could stop it.
    for script in ["yes", "echo once"] {
        let arguments = [&["run"], &MACHINE[..], &["--", "sh", "-c", script]].concat();
        let output = program(&sandbox, &arguments).stdout(full()).stderr(Stdio::piped()).output();
        let output = output.expect("it ends");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{script}: {stderr}");
        assert!(stderr.contains("cannot write to standard output"), "{stderr}");
        assert!(stderr.contains("No space left"), "{stderr}");
    }
    for script in ["yes >&2", "echo once >&2"] {
        let arguments = [&["run"], &MACHINE[..], &["--", "sh", "-c", script]].concat();
        let output = program(&sandbox, &arguments).stdout(Stdio::null()).stderr(full()).output();
        assert_eq!(output.expect("it ends").status.code(), Some(1), "{script}");
    }
    sandbox.assert_nothing_is_left();
}

#[test]
fn a_table_that_nobody_could_get_is_an_error() {
    let sandbox = Sandbox::new();
    let full = File::options().write(true).open("/dev/full").expect("a full disk");
    let arguments = [&up("unread")[..], &["--detach"]].concat();
    let output = program(&sandbox, &arguments).stdout(full).stderr(Stdio::piped()).output();
    let output = output.expect("it ends");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("cannot write to standard output"), "{stderr}");
    assert_eq!(sandbox.run(&["down", "unread"]).code, 0);
    sandbox.assert_nothing_is_left();
}

#[test]
fn who_follows_for_a_reader_that_has_gone_ends() {
    let sandbox = Sandbox::new();
    assert_eq!(sandbox.run(&[&up("read")[..], &["--detach"]].concat()).code, 0);
    for asked in [&["events", "read"][..], &["logs", "read", "gpu0"]] {
        let arguments = [asked, &["--tail", "1", "--follow"]].concat();
        let mut follow =
            program(&sandbox, &arguments).stdout(Stdio::piped()).spawn().expect("runs");
        let mut reader = BufReader::new(follow.stdout.take().expect("a pipe"));
        let mut line = String::new();
        reader.read_line(&mut line).expect("a line");
        drop(reader);
        let mut ended = None;
        eventually("it ends", LONG, || {
            ended = follow.try_wait().expect("a child");
            ended.is_some()
        });
        assert_eq!(ended.expect("ended").code(), Some(141), "{asked:?} after {line}");
    }
    assert_eq!(sandbox.run(&["down", "read"]).code, 0);
    sandbox.assert_nothing_is_left();
}

#[test]
fn ranks_hear_the_signal_that_came() {
    let sandbox = Sandbox::new();
    let script = "trap 'echo saved; exit 0' INT; echo running; while :; do sleep 0.05; done";
    let arguments = [&["run"], &MACHINE[..], &["--", "sh", "-c", script]].concat();
    let mut command = program(&sandbox, &arguments);
    let mut running = command.stdout(Stdio::piped()).spawn().expect("it starts");
    let mut stdout = running.stdout.take().expect("piped");
    let mut text = vec![0; 2 * "running\n".len()];
    stdout.read_exact(&mut text).expect("both run");
    signal(&running, Signal::SIGINT);
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).expect("read");
    assert_eq!(rest, "saved\nsaved\n");
    assert_eq!(running.wait().expect("it ends").code(), Some(128 + 2));
    sandbox.assert_nothing_is_left();
}

#[test]
fn nobody_reads_standard_input() {
    let sandbox = Sandbox::new();
    let arguments = [&["run"], &MACHINE[..], &["--", "cat"]].concat();
    let mut command = program(&sandbox, &arguments);
    let mut running =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
    // Held open: a rank that read it would wait.
    let held = running.stdin.take();
    assert_eq!(running.wait().expect("it ends").code(), Some(0));
    drop(held);
    sandbox.assert_nothing_is_left();
}

#[test]
fn dying_words_are_in_the_log_without_a_line_feed() {
    let sandbox = Sandbox::new();
    let arguments =
        [&["run"], &MACHINE[..], &["--name", "words", "--", "sh", "-c", "printf last; exit 3"]];
    let said = sandbox.run(&arguments.concat());
    assert_eq!(said.code, 3, "{said}");
    // The first that ends ends the others, which may not have said anything.
    let first = said.stderr.find("gpu").map(|at| &said.stderr[at..at + "gpu0".len()]);
    let logs = sandbox.run(&["logs", "words", first.expect("who ended first")]);
    assert_eq!((logs.code, logs.stdout.as_str()), (0, "last\n"), "{logs}");
}

/// What a command writes to a terminal of this width.
fn on_a_terminal(sandbox: &Sandbox, columns: u16, arguments: &[&str]) -> String {
    let size = Winsize { ws_row: 24, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    let terminal = openpty(Some(&size), None).expect("a terminal");
    let mut master = File::from(terminal.master);
    let end = || Stdio::from(terminal.slave.try_clone().expect("a descriptor"));
    let mut command = program(sandbox, arguments);
    command.stdin(end()).stdout(end()).stderr(end()).env("NO_COLOR", "1").env("TERM", "xterm");
    let mut running = command.spawn().expect("it starts");
    drop(command);
    drop(terminal.slave);
    let mut bytes = Vec::new();
    // The end of a terminal without writers is an error.
    let _ = master.read_to_end(&mut bytes);
    running.wait().expect("it ends");
    anstream::adapter::strip_str(&String::from_utf8_lossy(&bytes)).to_string()
}

#[test]
fn tables_notes_and_answers_fit_a_terminal_of_80_columns() {
    let sandbox = Sandbox::new();
    let running = sandbox.run(&[&up("fits")[..], &["--detach"]].concat());
    assert_eq!(running.code, 0, "{running}");
    let plan = ["plan", "--topology", "dgx-1-v100", "--enable-nvlink", "--enable-infiniband"];
    let plan = [&plan[..], &["--net-devices", "auto"]].concat();
    let tree = ["topo", "--topology", "dgx-h100", "-o", "tree"];
    let explained = ["plan", "--topology", "dgx-1-v100", "--explain", "gpu3"];
    for command in [
        &["ps", "fits"][..],
        &["ps", "fits", "-o", "wide"],
        &["verify", "fits", "--rounds", "1"],
        &plan,
        &["topo", "--topology", "dgx-h100"],
        &tree,
        &explained,
    ] {
        for columns in [80, 120] {
            let text = on_a_terminal(&sandbox, columns, command);
            // What was drawn over by a progress display does not stay.
            let stays = |line: &'_ str| line.rsplit('\r').next().unwrap_or_default().to_owned();
            let lines = text.lines().map(|line| stays(line.trim_end_matches('\r')));
            for line in lines {
                let length = line.trim_end().chars().count();
                assert!(length <= usize::from(columns), "{length} of {columns}: {line}\n{text}");
            }
        }
    }
    let whole = on_a_terminal(&sandbox, 80, &explained);
    let sentence = "data go to the disk";
    assert!(whole.contains(sentence), "a line is broken once, not twice: {whole}");
    let narrow = on_a_terminal(&sandbox, 80, &["ps", "fits"]);
    assert!(narrow.contains("-o wide shows all") && narrow.contains("READY"), "{narrow}");
    assert_eq!(sandbox.run(&["down", "fits"]).code, 0);
    sandbox.assert_nothing_is_left();
}

#[test]
fn a_name_from_outside_colours_hides_and_reorders_nothing_on_a_terminal() {
    let sandbox = Sandbox::new();
    let machine = sandbox.run(&["topo", "--topology", "rtx-4090-2", "-o", "yaml"]).stdout;
    let evil = machine.replace("NVIDIA GeForce", "\"\\e[31mGeForce \\u202e\\e[8m");
    let evil = evil.replace("RTX 4090,", "RTX 4090\",");
    assert_ne!(evil, machine);
    let file = sandbox.runtime().join("evil.yaml");
    std::fs::write(&file, evil).expect("written");
    let file = file.to_str().expect("a path");
    let size = (100, 40);
    for arguments in [
        &["topo", "--topology", file, "-o", "tree"][..],
        &["topo", "--topology", "\u{1b}[31mGeForce \u{202e}\u{1b}[8m"],
    ] {
        let mut screen = Screen::start(&sandbox, size, arguments);
        screen.wait_for("\\x1b[31mGeForce \\xe2\\x80\\xae\\x1b[8m");
        screen.wait();
        assert!(!screen.text().contains('\u{202e}'), "{}", screen.text());
    }
}

#[test]
fn a_measurement_of_links_that_is_ended_shows_what_it_has_measured() {
    let sandbox = Sandbox::new();
    let running = sandbox.run(&[&up("cut")[..], &["--detach"]].concat());
    assert_eq!(running.code, 0, "{running}");
    // Each way a latency, and four bandwidths that take seconds each.
    let bench = ["bench", "links", "cut", "-o", "table", "--size", "8,16,24,32", "--budget", "5s"];
    let mut screen = Screen::start(&sandbox, (160, 40), &bench);
    screen.wait_until("three bandwidths", |text| text.contains("4/10 measured"));
    screen.signal(Signal::SIGINT);
    assert_eq!(screen.wait(), Some(130));
    screen.wait_for("it was ended after 3 measurements");
    let text = screen.text();
    assert!(text.contains("FROM") && text.contains("gpu3"), "{text}");
    assert_eq!(sandbox.run(&["down", "cut"]).code, 0);
    sandbox.assert_nothing_is_left();
}

#[test]
fn a_process_that_has_not_written_yet_has_an_empty_log_that_can_be_followed() {
    let sandbox = Sandbox::new();
    let go = sandbox.runtime().join("go");
    let script =
        format!("until [ -e {} ]; do sleep 0.1; done; echo first; exec sleep 1000", go.display());
    let run = ["run", "--gpus", "none", "--cpu-workers", "1", "--name", "quiet", "--"];
    let running = sandbox.spawn(&[&run[..], &["sh", "-c", &script]].concat());
    until_ready(&sandbox, "quiet");
    let state = sandbox.state("quiet");
    let worker = state["workers"][0]["name"].as_str().expect("a name");
    let logs = sandbox.run(&["logs", "quiet", worker]);
    assert_eq!((logs.code, logs.stdout.as_str()), (0, ""), "{logs}");
    let unknown = sandbox.run(&["logs", "quiet", "gpu77"]);
    assert_eq!(unknown.code, 2, "{unknown}");
    assert!(unknown.stderr.contains(&format!("hint: there are: {worker}")), "{unknown}");
    let mut follower = sandbox.spawn(&["logs", "quiet", worker, "-f"]);
    std::fs::write(&go, "").expect("written");
    assert_eq!(follower.first_line(), "first");
    assert_eq!(sandbox.run(&["down", "quiet"]).code, 0);
    follower.wait();
    running.wait();
}

#[test]
fn a_command_that_is_below_another_one_is_named() {
    let sandbox = Sandbox::new();
    for (word, hint) in [
        ("transpose", "hint: cuda-cluster bench transpose"),
        ("check", "hint: cuda-cluster spec check"),
    ] {
        let said = sandbox.run(&[word]);
        assert_eq!(said.code, 2, "{said}");
        assert!(said.stderr.contains(hint), "{said}");
    }
    let unknown = sandbox.run(&["frobnicate"]);
    assert!(!unknown.stderr.contains("hint:"), "{unknown}");
}
