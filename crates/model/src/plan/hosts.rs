//! Decides which hosts get workers over ssh, by which words they are reached, and what they run.
//!
//! Reaches nobody, and does not know whether a host is there.
//!
//! *Invariant:* what the shell of a host reads is the same for all hosts, and has neither their
//! names nor anything secret in it.

use std::borrow::Cow;
use std::collections::BTreeSet;

use super::context::CallerEnvironment;
use super::engine::{EnginePlan, HostPlan};
use super::variables::protocol;
use crate::spec::{ClusterSpec, GpuSelection, Host, SchedulerSpec};

/// The hidden subcommand that hosts run.
pub const MEMBER: &str = "__member";

/// The program that hosts run, if no other is named, by their own `PATH`.
const PROGRAM: &str = "cuda-cluster";

/// Options for ssh, whatever its configuration says: no terminal; nobody can be asked for a
/// password; a connection that others use is not ended with the cluster; and neither commands nor
/// ports of the configuration get in the way of those that are open already.
pub const SSH_OPTIONS: [&str; 9] = [
    "-T",
    "-o",
    "BatchMode=yes",
    "-o",
    "ControlMaster=no",
    "-o",
    "RemoteCommand=none",
    "-o",
    "ClearAllForwardings=yes",
];

/// Which hosts get workers.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Hosts {
    /// Whether this machine does, too.
    pub(super) here: bool,
    /// The others.
    elsewhere: Vec<HostPlan>,
    /// What each of them is asked for, without the scheduler's address, which is not known yet.
    there: Option<ClusterSpec>,
}

impl Hosts {
    /// The spec for this machine: it has the scheduler alone, unless it is among the hosts.
    pub(super) fn for_here<'a>(&self, spec: Cow<'a, ClusterSpec>) -> Cow<'a, ClusterSpec> {
        if self.here {
            return spec;
        }
        let mut spec = spec.into_owned();
        spec.gpus = Some(GpuSelection::None);
        spec.workers = None;
        spec.workers_per_gpu = None;
        spec.cpu_workers = None;
        spec.dask.start_workers = None;
        spec.worker.ports = None;
        spec.overrides = Vec::new();
        Cow::Owned(spec)
    }

    /// The engine, with the others.
    pub(super) fn told_to(self, engine: EnginePlan) -> EnginePlan {
        let EnginePlan::Dask(mut dask) = engine else { return engine };
        if !self.elsewhere.is_empty() {
            // By GPU they are not unique.
            dask.names.clear();
        }
        (dask.hosts, dask.there) = (self.elsewhere, self.there);
        EnginePlan::Dask(dask)
    }
}

/// Divides the hosts of a spec; without any, this machine has the workers.
pub(super) fn divide(spec: &ClusterSpec, caller: &CallerEnvironment) -> Hosts {
    let named: Vec<Host> = spec.hosts().iter().filter_map(|text| text.parse().ok()).collect();
    let (own, others): (Vec<Host>, Vec<Host>) =
        named.iter().cloned().partition(|host| is_own(host, caller.host_name.as_deref()));
    let mut taken = BTreeSet::new();
    let elsewhere = others.iter().map(|host| HostPlan {
        process: process(host, &mut taken),
        host: host.to_string(),
        argv: argv(spec, host),
    });
    let there = (!others.is_empty()).then(|| for_elsewhere(spec));
    let here = named.is_empty() || !own.is_empty();
    Hosts { here, elsewhere: elsewhere.collect(), there }
}

/// Whether a host is this machine, by its own name or as loopback. With a user or a port it is
/// reached by ssh: an address of loopback may lead into a container or through a tunnel.
fn is_own(host: &Host, host_name: Option<&str>) -> bool {
    let same = |own: &str| host.name.eq_ignore_ascii_case(own);
    let named = host_name
        .is_some_and(|own| same(own) || own.split_once('.').is_some_and(|(short, _)| same(short)));
    let plain = host.user.is_none() && host.port.is_none();
    plain && (named || ["localhost", "127.0.0.1", "::1"].into_iter().any(same))
}

/// The name of the process that reaches a host, which is also its log's.
fn process(host: &Host, taken: &mut BTreeSet<String>) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || ".-_".contains(c) { c } else { '-' };
    let name: String = host.name.chars().map(plain).take(48).collect();
    let first = format!("host-{name}");
    let numbered = (2..).map(|number| format!("{first}-{number}"));
    let free = std::iter::once(first.clone()).chain(numbered).find(|name| !taken.contains(name));
    let name = free.unwrap_or(first);
    taken.insert(name.clone());
    name
}

/// The words that reach a host, and what its shell is to run.
fn argv(spec: &ClusterSpec, host: &Host) -> Vec<String> {
    let usual = || vec!["ssh".to_owned()];
    let mut argv = spec.dask.ssh.clone().unwrap_or_else(usual);
    argv.extend(SSH_OPTIONS.map(str::to_owned));
    if let Some(user) = &host.user {
        argv.extend(["-l".to_owned(), user.clone()]);
    }
    if let Some(port) = host.port {
        argv.extend(["-p".to_owned(), port.to_string()]);
    }
    let program = spec.dask.hosts_program.as_deref().unwrap_or(PROGRAM);
    argv.extend([host.name.clone(), format!("{} {MEMBER}", quoted(program))]);
    argv
}

/// A word for a shell of any kind; `~/` at its begin is the home directory there.
fn quoted(word: &str) -> String {
    let (home, rest) = match word.strip_prefix("~/") {
        Some(rest) => ("~/", rest),
        None => ("", word),
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+".contains(c);
    match rest.chars().all(plain) {
        true => word.to_owned(),
        false => format!("{home}'{}'", rest.replace('\'', r"'\''")),
    }
}

/// The spec for each of the others.
fn for_elsewhere(spec: &ClusterSpec) -> ClusterSpec {
    let mut there = spec.clone();
    there.name = Some(spec.name.clone().unwrap_or_default());
    there.scheduler = SchedulerSpec {
        interface: spec.scheduler.interface.clone(),
        dashboard: spec.scheduler.dashboard,
        ..SchedulerSpec::default()
    };
    // As the scheduler's, which has decided by what is here.
    there.dask.protocol = Some(protocol(spec));
    there.dask.hosts = None;
    there.dask.hosts_program = None;
    there.dask.ssh = None;
    // Whoever started the scheduler has the notes about these.
    there.dask.worker_names = None;
    there.supervision.scheduler_death = None;
    there
}

#[cfg(test)]
mod tests {
    use super::*;

    fn divided(text: &str) -> Hosts {
        let spec = crate::spec::parse(&format!("version: 1\nengine: dask\n{text}"), "test");
        let host_name = Some("login.example.org".to_owned());
        let caller = CallerEnvironment { host_name, ..CallerEnvironment::default() };
        divide(&spec.expect("a spec"), &caller)
    }

    fn names(hosts: &Hosts) -> Vec<&str> {
        hosts.elsewhere.iter().map(|one| one.process.as_str()).collect()
    }

    #[test]
    fn this_machine_has_workers_if_it_is_named_or_nobody_is() {
        assert!(divided("").here);
        assert!(!divided("dask: {hosts: [a]}").here);
        for own in ["localhost", "LOGIN", "login.example.org", "127.0.0.1", "'::1'"] {
            let hosts = divided(&format!("dask: {{hosts: [{own}, a]}}"));
            assert!(hosts.here, "{own}");
            assert_eq!(names(&hosts), ["host-a"], "{own}");
        }
        let reached = divided("dask: {hosts: ['localhost:2222', me@login]}");
        assert!(!reached.here);
        assert_eq!(names(&reached), ["host-localhost", "host-login"]);
    }

    #[test]
    fn processes_have_names_of_their_own_that_files_can_have() {
        let hosts = divided("dask: {hosts: [gpu0, 'gpu0:22', me@gpu0, 'fe80::1%eth0']}");
        assert_eq!(names(&hosts), ["host-gpu0", "host-gpu0-2", "host-gpu0-3", "host-fe80--1-eth0"]);
    }

    #[test]
    fn ssh_is_given_the_host_as_words_and_its_shell_the_program_alone() {
        let hosts = divided(
            "dask: {hosts: ['me@[::1]:2222'], ssh: [ssh, -F, my config], \
             hosts_program: \"~/my venv/it's\"}",
        );
        let argv = &hosts.elsewhere[0].argv;
        assert_eq!(argv[..4], ["ssh", "-F", "my config", "-T"]);
        let last = ["-l", "me", "-p", "2222", "::1", r"~/'my venv/it'\''s' __member"];
        assert_eq!(argv[argv.len() - 6..], last);
        let plain = divided("dask: {hosts: [a]}");
        let argv = &plain.elsewhere[0].argv;
        assert_eq!(argv[argv.len() - 2..], ["a", "cuda-cluster __member"]);
        assert_eq!(argv[0], "ssh");
    }

    #[test]
    fn words_for_a_shell_are_quoted_where_it_could_read_more_into_them() {
        for (word, shell) in [
            ("/opt/cuda-cluster", "/opt/cuda-cluster"),
            ("~/bin/cuda-cluster", "~/bin/cuda-cluster"),
            ("~other/bin", "'~other/bin'"),
            ("a;reboot", "'a;reboot'"),
            ("$(reboot)", "'$(reboot)'"),
            ("a b", "'a b'"),
            ("a'b", r"'a'\''b'"),
        ] {
            assert_eq!(quoted(word), shell);
        }
    }

    #[test]
    fn others_are_given_all_but_what_the_scheduler_alone_has() {
        let text = "name: d\ngpus: 0-1\nscheduler: {port: 9000, host: 10.0.0.1, interface: null}\n\
                    worker: {env: {TOKEN: secret}}\ndask: {hosts: [a], config: {x: y}}";
        let text = format!("version: 1\nengine: dask\n{text}");
        let spec = crate::spec::parse(&text, "test").expect("a spec");
        let there = for_elsewhere(&spec);
        assert_eq!(there.scheduler, SchedulerSpec::default());
        assert_eq!((there.dask.hosts, there.gpus), (None, spec.gpus.clone()));
        assert_eq!(there.worker.env, spec.worker.env);
        assert_eq!(there.dask.protocol.as_deref(), Some("tcp"));
        let here = Hosts::default().for_here(Cow::Borrowed(&spec));
        assert_eq!(here.gpus, Some(GpuSelection::None));
    }
}
