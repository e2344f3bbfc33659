//! `dashboard`: serves the page that shows this user's clusters in a browser.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use clap::Args;

use super::failure::{Exit, Failure};
use super::signals::Signals;
use super::{output, reach};
use crate::dashboard::{Dashboard, DashboardError, Listen};
use crate::ids::ClusterName;

/// Arguments of `dashboard`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  cuda-cluster dashboard                         # prints a link, and opens it where there is a browser
  cuda-cluster dashboard demo --listen 127.0.0.1:8788
  cuda-cluster dashboard --listen /run/user/1000/dashboard.sock
  ssh -L 8788:/run/user/1000/dashboard.sock HOST # then http://127.0.0.1:8788/ on your machine")]
pub(super) struct Arguments {
    /// The cluster to show first [default: the first one]
    name: Option<ClusterName>,
    /// A loopback address, or the path of a Unix socket that only this user can use
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    listen: String,
    /// Keep the token in this file, so that the link stays the same and Prometheus can use it
    /// [default: a new token]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Do not open a browser
    #[arg(long)]
    no_browser: bool,
}

/// Serves the page until a signal.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    let listen: Listen = arguments.listen.parse().map_err(|error| failed(Exit::Usage, error))?;
    if let Some(name) = &arguments.name {
        reach::find_also_ended(Some(name))?;
    }
    reach::runtime()?.block_on(async {
        let mut signals = Signals::new()?;
        let dashboard = Dashboard::bind(&listen, arguments.token_file.as_deref()).await;
        let dashboard = dashboard.map_err(|error| failed(Exit::Failed, error))?;
        match dashboard.link() {
            Some(link) => {
                let link = arguments
                    .name
                    .as_ref()
                    .map_or(link.clone(), |name| format!("{link}&cluster={name}"));
                output::print(&format!("{link}\n"))?;
                if !arguments.no_browser {
                    open_browser(&link);
                }
            }
            None => output::print(&format!("{}\n", arguments.listen))?,
        }
        output::status("serving the page to those who have this link; Ctrl-C ends it");
        tokio::select! {
            served = dashboard.serve() => {
                served.map(|()| Exit::Done).map_err(|error| Failure::new(Exit::Failed, error))
            }
            number = signals.next() => Ok(Exit::Signal(number)),
        }
    })
}

fn failed(exit: Exit, error: DashboardError) -> Failure {
    let hint = error.hint();
    Failure::new(exit, error).maybe_hint(hint)
}

/// Opens a browser where there is a screen for one. Its failure is not ours: the link is printed.
fn open_browser(link: &str) {
    let screen = ["DISPLAY", "WAYLAND_DISPLAY"];
    if screen.iter().all(|name| std::env::var_os(name).is_none_or(|value| value.is_empty())) {
        return;
    }
    let mut browser = Command::new("xdg-open");
    browser.arg(link).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    if let Ok(mut child) = browser.spawn() {
        // Reaped by a thread that has nothing else to do.
        let _ = std::thread::Builder::new().spawn(move || child.wait());
    }
}
