//! `dashboard`: serves the page that shows this user's clusters in a browser.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use clap::Args;

use super::failure::{Exit, Failure};
use super::signals::Signals;
use super::{output, reach};
use crate::dashboard::{Dashboard, DashboardError, Listen, Opening};
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
    let listen: Listen = arguments.listen.parse().map_err(failed)?;
    if let Some(name) = &arguments.name {
        reach::find_also_ended(Some(name))?;
    }
    reach::runtime()?.block_on(async {
        let mut signals = Signals::new()?;
        let dashboard = Dashboard::bind(&listen, arguments.token_file.as_deref()).await;
        let dashboard = dashboard.map_err(failed)?;
        // Until the end of the server.
        let mut _opening = None;
        match dashboard.link() {
            Some(link) => {
                let link = arguments
                    .name
                    .as_ref()
                    .map_or(link.clone(), |name| format!("{link}&cluster={name}"));
                output::print(&format!("{link}\n"))?;
                if !arguments.no_browser && has_screen() {
                    _opening = opened(&link);
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

fn failed(error: DashboardError) -> Failure {
    use DashboardError::{NoAddress, NotLoopback, TokenFile};
    let exit = match &error {
        NoAddress { .. } | NotLoopback { .. } | TokenFile { .. } => Exit::Usage,
        _ => Exit::Failed,
    };
    let hint = error.hint();
    Failure::new(exit, error).maybe_hint(hint)
}

/// Whether there is a screen for a browser.
fn has_screen() -> bool {
    let screen = ["DISPLAY", "WAYLAND_DISPLAY"];
    screen.iter().any(|name| std::env::var_os(name).is_some_and(|value| !value.is_empty()))
}

/// Opens a browser, and returns the file that leads it to the page. A failure is only noted: the
/// link is printed.
fn opened(link: &str) -> Option<Opening> {
    let opening = match Opening::write(link) {
        Ok(opening) => opening,
        Err(error) => {
            output::note(&format!("no browser is opened: {}", crate::text::in_full(&error)));
            return None;
        }
    };
    let mut browser = Command::new("xdg-open");
    // Not the link: everybody can read command lines, and it has the token.
    browser.arg(opening.path()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = browser.spawn().ok()?;
    output::status(&format!(
        "a browser opens {}, which leads there; one that may not read this file (from snap) needs \
         the link",
        opening.path().display()
    ));
    // Reaped by a thread that has nothing else to do.
    let _ = std::thread::Builder::new().spawn(move || child.wait());
    Some(opening)
}
