//! Decides what follows from what another machine says, and why it could not be reached.
//!
//! Runs and reads nothing.
//!
//! *Invariant:* an end that was not asked for has a reason that names the machine.

use std::collections::VecDeque;

use super::words::Said;
use cuda_cluster_model::plan::{HostPlan, MEMBER, SSH_OPTIONS};
use cuda_cluster_wire::status::{AfterLeaving, Condition, Status};

/// What happens.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Event {
    /// The other end has written a line.
    Line(String),
    /// So has ssh, or the other end, on standard error.
    Complaint(String),
    /// The supervisor asks.
    Question,
    /// The supervisor wants the end.
    Stop,
    /// A stream is at its end.
    Closed,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "there are two at a time, and few")]
pub(super) enum Act {
    /// Tell the supervisor.
    Say(Status),
    /// Tell the other end what is asked for.
    Assign,
    /// Ask the other end whether it is there.
    Ask,
    /// Have the other end bring its workers down, and wait for it.
    LetGo,
    /// End ssh.
    End,
}

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Connecting,
    Starting,
    Ready,
}

/// So many lines of standard error are remembered.
const REMEMBERED: usize = 8;

/// Status of ssh for a failure of its own (ssh(1), EXIT STATUS).
const OF_SSH: i32 = 255;

/// The version of both ends.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The course of one connection.
#[derive(Debug)]
pub(super) struct Course {
    host: String,
    /// How a person tries the same.
    trial: String,
    program: String,
    stage: Stage,
    stopping: bool,
    /// Whether the other end has brought its workers down by a wish from elsewhere.
    left: bool,
    /// Why it fails, as far as known.
    reason: Option<String>,
    complaints: VecDeque<String>,
}

impl Course {
    pub(super) fn new(host: &HostPlan) -> Self {
        let (command, words) =
            host.argv.split_last().map_or(("", &[][..]), |(last, words)| (last.as_str(), words));
        // What is ours alone is not for a person.
        let mut shown: Vec<&str> = Vec::new();
        let mut words = words.iter().map(String::as_str).peekable();
        while let Some(word) = words.next() {
            match word {
                "-T" => {}
                "-o" if words.peek().is_some_and(|option| SSH_OPTIONS.contains(option)) => {
                    words.next();
                }
                word => shown.push(word),
            }
        }
        Self {
            host: host.host.clone(),
            trial: format!("{} true", shown.join(" ")),
            program: command.strip_suffix(MEMBER).unwrap_or(command).trim_end().to_owned(),
            stage: Stage::Connecting,
            stopping: false,
            left: false,
            reason: None,
            complaints: VecDeque::new(),
        }
    }

    /// What the supervisor is told first.
    pub(super) fn begins(&self) -> Status {
        Status::Step { step: format!("connecting to {} by ssh", self.host) }
    }

    /// Why it fails where there is no ssh.
    pub(super) fn without_ssh(&self, error: &str) -> String {
        let ssh = self.trial.split(' ').next().unwrap_or_default();
        format!(
            "{ssh}, which reaches {}, cannot be run here ({error}); install OpenSSH's client, \
                 or name another program in 'dask.ssh'",
            self.host
        )
    }

    pub(super) fn handle(&mut self, event: Event) -> Vec<Act> {
        match event {
            Event::Line(line) => match serde_json::from_str(&line) {
                Ok(said) => self.said(said),
                // A shell's greeting.
                Err(_) => {
                    self.complain(line);
                    Vec::new()
                }
            },
            Event::Complaint(line) => {
                self.complain(line);
                Vec::new()
            }
            Event::Question if self.stage == Stage::Ready => vec![Act::Ask],
            Event::Question | Event::Closed => Vec::new(),
            Event::Stop => {
                self.stopping = true;
                // Nothing is there yet that would have to end in order.
                vec![if self.stage == Stage::Connecting { Act::End } else { Act::LetGo }]
            }
        }
    }

    fn complain(&mut self, line: String) {
        let line = line.trim();
        if !line.is_empty() {
            self.complaints.push_back(line.to_owned());
        }
        if self.complaints.len() > REMEMBERED {
            self.complaints.pop_front();
        }
    }

    fn said(&mut self, said: Said) -> Vec<Act> {
        match said {
            Said::Hello { version } if version != VERSION => {
                self.reason = Some(format!(
                    "{} has version {version} of cuda-cluster, and this machine has {VERSION}; \
                     install the same on both",
                    self.host
                ));
                vec![Act::End]
            }
            Said::Hello { .. } if self.stage == Stage::Connecting => {
                self.stage = Stage::Starting;
                let step = format!("{} brings up its workers", self.host);
                vec![Act::Say(Status::Step { step }), Act::Assign]
            }
            Said::Ready if self.stage == Stage::Starting => {
                self.stage = Stage::Ready;
                vec![Act::Say(Status::Ready {
                    address: Some(self.host.clone()),
                    peers: Vec::new(),
                    ucx: None,
                    condition: Condition::default(),
                })]
            }
            Said::Alive => vec![Act::Say(Status::Alive { condition: Condition::default() })],
            Said::Failed { message, causes, hint } => {
                let mut reason = format!("{}: {message}", self.host);
                for cause in causes.iter().filter(|cause| !message.contains(*cause)) {
                    reason.push_str(&format!(": {cause}"));
                }
                if let Some(hint) = hint {
                    reason.push_str(&format!(" ({hint})"));
                }
                self.reason = Some(reason);
                Vec::new()
            }
            Said::Ended => {
                self.left = !self.stopping;
                Vec::new()
            }
            Said::Hello { .. } | Said::Ready => Vec::new(),
        }
    }

    /// What the supervisor is told when ssh has ended with this code, and whether that is as it
    /// should be. `how` says how it has ended.
    pub(super) fn ended(&self, code: Option<i32>, how: &str) -> (Option<Status>, bool) {
        if self.stopping {
            return (None, true);
        }
        if self.left {
            let reason = format!("the workers of {} are not wanted any more", self.host);
            return (Some(Status::Leaving { then: AfterLeaving::Rest, reason, lost: false }), true);
        }
        let reason = self.reason.clone().unwrap_or_else(|| self.why(code, how));
        (Some(Status::Failed { reason }), false)
    }

    fn why(&self, code: Option<i32>, how: &str) -> String {
        let (host, program) = (&self.host, &self.program);
        let last = self.complaints.back().map(String::as_str);
        let said = last.map_or_else(|| format!("ssh ended: {how}"), str::to_owned);
        match (self.stage, code) {
            (Stage::Connecting, Some(OF_SSH)) => {
                format!("{host} is not reached: {said} (try: {})", self.trial)
            }
            (Stage::Connecting, Some(126 | 127)) => format!(
                "{host} has no {program} ({said}); install version {VERSION} of cuda-cluster there, \
                 or name its path there in 'dask.hosts_program'"
            ),
            (Stage::Connecting, _) => format!(
                "{program} on {host} did not say its version ({said}); install version {VERSION} of \
                 cuda-cluster there (try: {})",
                self.trial
            ),
            (_, Some(OF_SSH) | None) => {
                // The other end writes there, too.
                let own = last.filter(|line| code.is_some() && is_of_ssh(line));
                let said = own.map_or_else(|| format!("ssh ended: {how}"), str::to_owned);
                format!("the connection to {host} is lost: {said}")
            }
            (_, Some(code)) => {
                format!("cuda-cluster on {host} ended with status {code}: {said}")
            }
        }
    }
}

/// Whether a line is what OpenSSH's client says when a connection ends.
fn is_of_ssh(line: &str) -> bool {
    let begins =
        ["Connection ", "client_loop: ", "Timeout, ", "packet_write_", "Read from ", "ssh"];
    begins.iter().any(|begin| line.starts_with(begin))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn course() -> Course {
        let words = ["ssh", "-F", "config", "-T", "-o", "BatchMode=yes", "-p", "22", "b"];
        let mut argv: Vec<String> = words.map(str::to_owned).to_vec();
        argv.push(format!("cuda-cluster {MEMBER}"));
        Course::new(&HostPlan { process: "host-b".to_owned(), host: "b:22".to_owned(), argv })
    }

    fn line(said: &Said) -> Event {
        Event::Line(serde_json::to_string(said).expect("JSON"))
    }

    fn hello(version: &str) -> Event {
        line(&Said::Hello { version: version.to_owned() })
    }

    fn reason(course: &Course, code: Option<i32>) -> String {
        match course.ended(code, "exit status: 1") {
            (Some(Status::Failed { reason }), false) => reason,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn workers_are_asked_for_when_the_version_is_right_and_ready_when_they_say_so() {
        let mut course = course();
        assert_eq!(course.handle(Event::Line("Welcome to b!".to_owned())), []);
        assert_eq!(course.handle(Event::Question), []);
        let acts = course.handle(hello(VERSION));
        assert_eq!(acts.last(), Some(&Act::Assign));
        let acts = course.handle(line(&Said::Ready));
        let [Act::Say(Status::Ready { address, .. })] = &acts[..] else { panic!("{acts:?}") };
        assert_eq!(address.as_deref(), Some("b:22"));
        assert_eq!(course.handle(Event::Question), [Act::Ask]);
        assert_eq!(course.handle(Event::Stop), [Act::LetGo]);
        assert_eq!(course.ended(Some(0), ""), (None, true));
    }

    #[test]
    fn another_version_is_asked_for_nothing() {
        let mut course = course();
        assert_eq!(course.handle(hello("0.0.1")), [Act::End]);
        assert_eq!(course.handle(line(&Said::Ready)), []);
        assert!(reason(&course, None).contains("b:22 has version 0.0.1 of cuda-cluster"));
    }

    #[test]
    fn who_is_not_reached_is_named_with_sshs_own_words() {
        let mut course = course();
        let denied = "me@b: Permission denied (publickey).";
        course.handle(Event::Complaint(denied.to_owned()));
        let reason = reason(&course, Some(255));
        assert!(reason.contains(denied), "{reason}");
        assert!(reason.contains("try: ssh -F config -p 22 b true"), "{reason}");
    }

    #[test]
    fn a_machine_without_the_program_is_told_what_to_do() {
        let mut course = course();
        course.handle(Event::Complaint("bash: line 1: cuda-cluster: not found".to_owned()));
        let reason = reason(&course, Some(127));
        assert!(reason.starts_with("b:22 has no cuda-cluster (bash"), "{reason}");
        assert!(reason.contains("'dask.hosts_program'"), "{reason}");
    }

    #[test]
    fn the_other_ends_own_reason_is_told_and_a_lost_connection_is_one() {
        let mut course = course();
        course.handle(hello(VERSION));
        course.handle(Event::Complaint("note: simulation: 2 CPUs".to_owned()));
        let lost = "the connection to b:22 is lost: ssh ended: exit status: 1";
        assert_eq!(reason(&course, Some(255)), lost);
        course.handle(Event::Complaint("Connection to b closed by remote host.".to_owned()));
        assert!(reason(&course, Some(255)).ends_with("Connection to b closed by remote host."));
        let (message, hint) = ("no GPU".to_owned(), Some("buy one".to_owned()));
        course.handle(line(&Said::Failed { message, causes: vec!["x".to_owned()], hint }));
        assert_eq!(reason(&course, Some(1)), "b:22: no GPU: x (buy one)");
    }

    #[test]
    fn workers_that_are_sent_away_are_no_failure() {
        let mut course = course();
        course.handle(hello(VERSION));
        course.handle(line(&Said::Ready));
        course.handle(line(&Said::Ended));
        let (status, good) = course.ended(Some(0), "");
        assert!(good && matches!(status, Some(Status::Leaving { lost: false, .. })));
    }
}
