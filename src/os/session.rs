//! This process among others: its own program, its session, and a word to another process.

use std::path::PathBuf;

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, dup2_stderr, dup2_stdin, dup2_stdout, setsid};

/// The program that this process runs, to be started again as something else.
///
/// Its path for people to recognise in `ps`, or `/proc/self/exe` when the file has been replaced.
pub fn own_program() -> PathBuf {
    match std::env::current_exe() {
        Ok(path) if path.exists() => path,
        _ => PathBuf::from("/proc/self/exe"),
    }
}

/// Leaves the terminal's session, so that its end and its Ctrl-C reach this process no more.
pub fn become_session_leader() {
    // Fails only for a process that leads its group already, and then it has what it needs.
    let _ = setsid();
}

/// Points standard input, output and error at `/dev/null`: whoever read them goes on without.
///
/// # Errors
/// If `/dev/null` cannot be opened.
pub fn let_go_of_output() -> std::io::Result<()> {
    let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
    dup2_stdin(&null)?;
    dup2_stdout(&null)?;
    dup2_stderr(&null)?;
    Ok(())
}

/// Asks a process to end. One that is gone already has.
pub fn terminate(pid: u32) {
    if let Ok(pid) = i32::try_from(pid) {
        let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
    }
}
