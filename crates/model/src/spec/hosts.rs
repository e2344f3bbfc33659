//! Machines that get workers of the same cluster, as they are named to ssh.
//!
//! Resolves no name and reaches nobody.
//!
//! *Invariant:* nothing of a host's name is an option for ssh, or is read by a shell.

use core::net::Ipv6Addr;
use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use super::error::{Found, refuse};
use super::{ClusterSpec, EngineKind};

/// Most hosts of a cluster.
const MOST: usize = 512;

/// Longest name of a host, as DNS has it.
const LONGEST: usize = 253;

/// A machine: `gpu1`, `user@gpu1`, `gpu1:2222`, `[fe80::1]:22`, or a name of ssh's configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// Who logs in there; `None` leaves it to ssh.
    pub user: Option<String>,
    /// Its name or address; an IPv6 address is without brackets.
    pub name: String,
    /// Where its sshd listens; `None` leaves it to ssh.
    pub port: Option<u16>,
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(user) = &self.user {
            write!(f, "{user}@")?;
        }
        match (self.name.contains(':'), self.port) {
            (true, Some(port)) => write!(f, "[{}]:{port}", self.name),
            (false, Some(port)) => write!(f, "{}:{port}", self.name),
            (_, None) => f.write_str(&self.name),
        }
    }
}

/// Why a text names no host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each variant is")]
pub enum HostError {
    #[error("it is empty")]
    Empty,
    #[error("it begins with '-', as options do")]
    Option,
    #[error("{0:?} is in no host's name")]
    Character(char),
    #[error("{0:?} is in no user's name here")]
    User(char),
    #[error("there is no user before the '@'")]
    Nobody,
    #[error("its port is not a number from 1 to 65535")]
    Port,
    #[error("its brackets hold no IPv6 address")]
    Address,
    #[error("it is longer than {LONGEST} characters")]
    Long,
}

impl FromStr for Host {
    type Err = HostError;

    fn from_str(text: &str) -> Result<Self, HostError> {
        let (user, place) = match text.rsplit_once('@') {
            Some((user, place)) => (Some(user), place),
            None => (None, text),
        };
        if let Some(user) = user {
            let odd = |c: &char| !(c.is_ascii_alphanumeric() || "._-+@".contains(*c));
            match user.chars().find(odd) {
                _ if user.is_empty() => return Err(HostError::Nobody),
                _ if user.starts_with('-') => return Err(HostError::Option),
                Some(odd) => return Err(HostError::User(odd)),
                None => {}
            }
        }
        let (name, port) = parts(place)?;
        if name.is_empty() {
            return Err(HostError::Empty);
        }
        if name.starts_with('-') {
            return Err(HostError::Option);
        }
        if name.len() > LONGEST {
            return Err(HostError::Long);
        }
        let odd = |c: &char| !(c.is_ascii_alphanumeric() || "._-".contains(*c));
        if let Some(odd) = name.chars().find(odd).filter(|_| !is_address(name)) {
            return Err(HostError::Character(odd));
        }
        let port = port.map(number).transpose()?;
        Ok(Self { user: user.map(str::to_owned), name: name.to_owned(), port })
    }
}

/// The name and the port. An IPv6 address without brackets has none.
fn parts(place: &str) -> Result<(&str, Option<&str>), HostError> {
    if let Some(rest) = place.strip_prefix('[') {
        let (address, after) = rest.split_once(']').ok_or(HostError::Address)?;
        if !is_address(address) {
            return Err(HostError::Address);
        }
        return match after.strip_prefix(':') {
            Some(port) => Ok((address, Some(port))),
            None if after.is_empty() => Ok((address, None)),
            None => Err(HostError::Port),
        };
    }
    match place.split_once(':') {
        Some((name, port)) if !is_address(place) => Ok((name, Some(port))),
        _ => Ok((place, None)),
    }
}

/// Whether this is an IPv6 address, perhaps with the interface that leads to it.
fn is_address(name: &str) -> bool {
    let (address, zone) = name.split_once('%').unwrap_or((name, "lo"));
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    address.parse::<Ipv6Addr>().is_ok() && !zone.is_empty() && zone.chars().all(plain)
}

fn number(port: &str) -> Result<u16, HostError> {
    let digits = !port.is_empty() && port.chars().all(|c| c.is_ascii_digit());
    let port = port.parse::<u16>().ok().filter(|port| digits && *port > 0);
    port.ok_or(HostError::Port)
}

impl ClusterSpec {
    /// The machines that get workers; empty for this one alone.
    pub fn hosts(&self) -> &[String] {
        self.dask.hosts.as_deref().unwrap_or_default()
    }
}

/// Checks what concerns hosts.
pub(super) fn check(spec: &ClusterSpec) -> Result<(), Found> {
    let hosts = spec.hosts();
    if spec.dask.ssh.as_ref().is_some_and(|words| words.first().is_none_or(String::is_empty)) {
        return refuse("dask.ssh", "it names no program", "leave it out for 'ssh'");
    }
    if let Some(program) = spec.dask.hosts_program.as_deref()
        && (program.is_empty() || program.starts_with('-') || program.contains(char::is_control))
    {
        let message = format!("{program:?} names no program");
        return refuse("dask.hosts_program", message, "give the path of cuda-cluster there");
    }
    if hosts.len() > MOST {
        return refuse("dask.hosts", format!("more than {MOST} are not meant"), "name fewer");
    }
    let mut known = BTreeSet::new();
    for (at, text) in hosts.iter().enumerate() {
        let key = format!("dask.hosts[{at}]");
        let hint = "name a host as for ssh: gpu1, user@gpu1, gpu1:2222, [fe80::1]:22";
        match text.parse::<Host>() {
            Err(error) => return refuse(&key, format!("{text:?} names no host: {error}"), hint),
            Ok(host) if !known.insert(host.to_string()) => {
                return refuse(&key, format!("{text} is named twice"), "name each host once");
            }
            Ok(_) => {}
        }
    }
    match hosts.is_empty() {
        true => Ok(()),
        false => beside(spec),
    }
}

/// Checks what a spec with hosts has besides them.
fn beside(spec: &ClusterSpec) -> Result<(), Found> {
    let (dask, worker) = (&spec.dask, &spec.worker);
    if spec.engine != Some(EngineKind::Dask) {
        let engine = spec.engine.unwrap_or_default();
        let message =
            format!("the engine is {engine}, and only dask has workers on other machines");
        return refuse("dask.hosts", message, "set 'engine: dask'");
    }
    if dask.join.is_some() {
        let hint = "drop 'dask.hosts', or 'dask.join'";
        return refuse("dask.hosts", "they join the scheduler of this machine", hint);
    }
    if dask.adapt_minimum.is_some() {
        let message = "the workers of other machines do not come and go with the work";
        return refuse("dask.adapt_minimum", message, "drop 'dask.adapt_minimum'");
    }
    for (key, address) in [
        ("worker.listen_address", &worker.listen_address),
        ("worker.contact_address", &worker.contact_address),
    ] {
        if address.is_some() {
            let hint = "leave it out, or name an interface: 'scheduler.interface'";
            return refuse(key, "one address cannot serve the workers of several hosts", hint);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(text: &str) -> (Option<String>, String, Option<u16>) {
        let host: Host = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(host.to_string().parse(), Ok(host.clone()), "{text}");
        (host.user, host.name, host.port)
    }

    #[test]
    fn a_host_is_named_as_for_ssh() {
        assert_eq!(host("gpu1"), (None, "gpu1".to_owned(), None));
        assert_eq!(host("a.b-c_d:2222"), (None, "a.b-c_d".to_owned(), Some(2222)));
        assert_eq!(host("me@gpu1:22"), (Some("me".to_owned()), "gpu1".to_owned(), Some(22)));
        assert_eq!(host("a@realm@gpu1"), (Some("a@realm".to_owned()), "gpu1".to_owned(), None));
        assert_eq!(host("fe80::1%eth0"), (None, "fe80::1%eth0".to_owned(), None));
        assert_eq!(host("[::1]:22"), (None, "::1".to_owned(), Some(22)));
        assert_eq!(host("me@[::1]"), (Some("me".to_owned()), "::1".to_owned(), None));
    }

    #[test]
    fn what_ssh_or_a_shell_could_take_for_something_else_names_no_host() {
        for (text, error) in [
            ("", HostError::Empty),
            ("-oProxyCommand=reboot", HostError::Option),
            ("me@-oProxyCommand=reboot", HostError::Option),
            ("-l@gpu1", HostError::Option),
            ("gpu1;reboot", HostError::Character(';')),
            ("gpu1 reboot", HostError::Character(' ')),
            ("$(reboot)", HostError::Character('$')),
            ("`reboot`", HostError::Character('`')),
            ("gpu1\n", HostError::Character('\n')),
            ("gpu1\0", HostError::Character('\0')),
            ("gpü1", HostError::Character('ü')),
            ("a/b", HostError::Character('/')),
            ("$USER@gpu1", HostError::User('$')),
            ("a b@gpu1", HostError::User(' ')),
            ("@gpu1", HostError::Nobody),
            ("gpu1:", HostError::Port),
            ("gpu1:0", HostError::Port),
            ("gpu1:65536", HostError::Port),
            ("gpu1:+22", HostError::Port),
            ("gpu1:22:33", HostError::Port),
            ("[::1]22", HostError::Port),
            ("[gpu1]:22", HostError::Address),
            ("[::1", HostError::Address),
            ("fe80::1%;reboot", HostError::Port),
            (":22", HostError::Empty),
            ("me@", HostError::Empty),
        ] {
            assert_eq!(text.parse::<Host>(), Err(error), "{text:?}");
        }
        assert_eq!("a".repeat(254).parse::<Host>(), Err(HostError::Long));
    }
}
