//! `up` over several hosts: where its scheduler listens, so that the others reach it.
//!
//! Reaches no host; asks the system's names and routes, and ssh for the names of its configuration.
//!
//! *Invariant:* what the user has said about that is left as it is.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::failure::{Exit, Failure};
use super::{gathering, output};
use crate::spec::{Host, Request};

/// Has the scheduler listen where the hosts of a request reach it.
pub(super) fn settle(request: &mut Request) -> Result<(), Failure> {
    let spec = &mut request.spec;
    if spec.hosts().is_empty() {
        return Ok(());
    }
    // Hosts begin in another directory, and a plan that is kept has no machine that they are given.
    if let Some(topology) = &mut spec.topology
        && Path::new(topology).is_relative()
        && Path::new(topology).is_file()
    {
        let here = std::env::current_dir().unwrap_or_else(|_| PathBuf::from("."));
        *topology = here.join(&*topology).display().to_string();
    }
    if spec.scheduler.host.is_some() || spec.scheduler.interface.is_some() {
        return Ok(());
    }
    let ssh = spec.dask.ssh.clone().unwrap_or_else(|| vec!["ssh".to_owned()]);
    let hosts = spec.hosts().iter().filter_map(|text| text.parse::<Host>().ok());
    let faced = hosts.filter_map(|host| Some((facing(&resolved(&ssh, &host)?)?, host)));
    let mut faced: Vec<(IpAddr, Host)> = faced.collect();
    // Loopback is of use to others only if they are all here.
    faced.sort_by_key(|(address, _)| address.is_loopback());
    let all = faced.len() == spec.hosts().len();
    if let Some((address, host)) = faced.first().filter(|(one, _)| all || !one.is_loopback()) {
        if !address.is_loopback() {
            output::note(&format!(
                "the scheduler listens on {address}, from which {host} is reached; --host or \
                 --interface names another address"
            ));
        }
        spec.scheduler.host = Some(address.to_string());
        return Ok(());
    }
    let Some(interface) = gathering::default_interface() else {
        let error = anyhow::anyhow!("nothing says where the hosts reach this machine");
        let hint = "name the network interface that connects them: --interface ib0";
        return Err(Failure::new(Exit::Usage, error).hint(hint));
    };
    output::note(&format!(
        "the scheduler listens on {interface}, which leads to other networks; --host or --interface \
         names another address"
    ));
    spec.scheduler.interface = Some(interface);
    Ok(())
}

/// The address of a host; `None` if it has none that this machine knows.
fn resolved(ssh: &[String], host: &Host) -> Option<SocketAddr> {
    let name = configured(ssh, host).unwrap_or_else(|| host.name.clone());
    (name.as_str(), host.port.unwrap_or(22)).to_socket_addrs().ok()?.next()
}

/// The name that ssh's configuration has for a host (`ssh -G`, which connects to nobody).
fn configured(ssh: &[String], host: &Host) -> Option<String> {
    let (program, words) = ssh.split_first()?;
    let mut asked = Command::new(program);
    asked.args(words).args(["-G", &host.name]).stdin(Stdio::null()).stderr(Stdio::null());
    let said = asked.output().ok().filter(|said| said.status.success())?;
    let said = String::from_utf8(said.stdout).ok()?;
    said.lines().find_map(|line| line.strip_prefix("hostname ")).map(str::to_owned)
}

/// The address of this machine from which another one is reached; nothing is sent.
fn facing(other: &SocketAddr) -> Option<IpAddr> {
    let any: SocketAddr = match other {
        SocketAddr::V4(_) => ([0, 0, 0, 0], 0).into(),
        SocketAddr::V6(_) => ([0u16; 8], 0).into(),
    };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(other).ok()?;
    Some(socket.local_addr().ok()?.ip())
}
