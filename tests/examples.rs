//! The example programs do what their first lines say.

#![cfg(feature = "cli")]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// An example, which Cargo builds beside the tests' own binaries, with run directories of its own.
fn example(name: &str, runtime: &Path) -> Command {
    let mut program = PathBuf::from(env!("CARGO_BIN_EXE_cuda-cluster"));
    program.set_file_name("examples");
    let mut command = Command::new(program.join(name));
    command.env("XDG_RUNTIME_DIR", runtime).env_remove("LD_LIBRARY_PATH");
    command
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A directory with a short path, because paths of sockets have a limit.
fn short() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("cce").tempdir_in("/tmp").expect("a directory")
}

#[test]
fn a_data_job_reduces_what_it_mapped_and_handles_what_fails() {
    let directory = short();
    let said = text(&example("data_job", directory.path()).output().expect("built"));
    // 2 · (0 + 1 + … + 199999)
    assert!(said.contains("the sum is 39999800000\n"), "{said}");
    assert!(said.contains("scaled here: [10.0, 20.0, 30.0]"), "{said}");
    assert!(said.contains("failed: the value is not of type f32"), "{said}");
    assert!(said.contains("no result within 200ms"), "{said}");
    assert!(said.contains("gpu0 goes on: 6"), "{said}");
}

#[test]
fn a_planner_tells_reasons_for_a_machine_that_is_elsewhere() {
    let directory = short();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut command = example("planner", directory.path());
    let spec = root.join("configs/nvlink.yaml");
    let said = text(&command.arg("dgx-h100").arg(&spec).output().expect("built"));
    assert!(said.contains("gpu7: CPUs 56-111"), "{said}");
    assert!(said.contains("  env.UCX_TLS: "), "{said}");
    // The same machine as a file, as somebody would have captured it.
    let file = root.join("topologies/dgx-h100.yaml");
    let mut command = example("planner", directory.path());
    assert_eq!(text(&command.arg(file).arg(&spec).output().expect("built")), said);
    // What the machine cannot satisfy is told, with what to do.
    let spec = directory.path().join("nine.yaml");
    std::fs::write(&spec, "version: 1\nworkers: 9\n").expect("written");
    let mut command = example("planner", directory.path());
    let refused = command.arg("dgx-h100").arg(&spec).output().expect("built");
    let told = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    assert!(told.contains("error: ") && told.contains("hint: "), "{told}");
}

/// A running service, which a failed test does not leave behind.
struct Service(Child);

impl Service {
    fn ends_well(&mut self) -> bool {
        self.0.wait().expect("it ends").success()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // Fails if it has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts the service, and waits for the line that says that it listens.
fn serve(runtime: &Path) -> (Service, PathBuf) {
    let socket = runtime.join("service.sock");
    let mut command = example("service", runtime);
    let mut service = Service(command.arg(&socket).stdout(Stdio::piped()).spawn().expect("built"));
    let mut line = String::new();
    let stdout = service.0.stdout.as_mut().expect("piped");
    BufReader::new(stdout).read_line(&mut line).expect("a line");
    assert_eq!(line, "listening\n");
    (service, socket)
}

fn ask(socket: &Path, request: &str) -> String {
    let mut stream = UnixStream::connect(socket).expect("it listens");
    stream.write_all(format!("{request}\n").as_bytes()).expect("sent");
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).expect("an answer");
    answer.trim_end().to_owned()
}

#[test]
fn a_service_answers_and_ends_in_order_with_its_cluster() {
    let directory = short();
    let (mut service, socket) = serve(directory.path());
    assert_eq!(ask(&socket, "state"), "READY: gpu0 READY gpu3 READY");
    assert_eq!(ask(&socket, "sum 1 2 3"), "6");
    assert_eq!(ask(&socket, "restart gpu0"), "it restarts");
    assert!(ask(&socket, "restart gpu9").starts_with("error: "));
    assert!(ask(&socket, "nonsense").starts_with("error: one of"));
    assert_eq!(ask(&socket, "stop"), "it stops");
    assert!(service.ends_well());
    assert!(!socket.exists());
    // The same name again at once, and the same end by a signal.
    let (mut service, _) = serve(directory.path());
    kill(Pid::from_raw(service.0.id().try_into().expect("a pid")), Signal::SIGTERM).expect("sent");
    assert!(service.ends_well());
    // If its cluster ends, it ends, too, and says why.
    let (mut service, _) = serve(directory.path());
    let mut down = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
    let down = down.args(["down", "service"]).env("XDG_RUNTIME_DIR", directory.path()).output();
    assert!(down.expect("run").status.success());
    assert!(service.ends_well());
    let left = std::fs::read_dir(directory.path().join("cuda-cluster"));
    assert_eq!(left.into_iter().flatten().count(), 0);
}
