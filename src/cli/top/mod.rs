//! `top`: watches clusters on a terminal.
//!
//! Measures nothing itself: it shows what `dashboard` tells its pages.
//!
//! *Invariant:* the terminal is restored however this ends.

mod draw;
mod model;
#[cfg(test)]
mod screens;
mod session;
mod table;

use std::io;
use std::time::{Duration, SystemTime};

use clap::Args;
use ratatui::crossterm::event::{Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::widgets::TableState;

use super::failure::{Exit, Failure};
use super::reach;
use super::signals::Signals;
use crate::cluster::{self, FindError};
use crate::dashboard::Watch;
use crate::ids::ClusterName;
use model::Picture;
use session::Session;

/// Watches running clusters on a terminal.
#[derive(Args, Debug)]
#[command(after_help = "\
Keys:
  Up, Down, k, j   select a process
  Tab              the next cluster
  q, Esc, Ctrl-C   quit

Examples:
  cuda-cluster top
  cuda-cluster top demo")]
pub(super) struct Arguments {
    /// The cluster to show first [default: the first one]
    name: Option<ClusterName>,
}

/// Time between two readings of the figures, and between two pictures.
const EVERY: Duration = Duration::from_secs(1);

/// Watches clusters until a key, a signal, or the end of the terminal.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    if !Session::is_possible() {
        let error = anyhow::anyhow!("top needs a terminal to draw on, and to read keys from");
        let hint = "for a program: cuda-cluster ps -o json";
        return Err(Failure::new(Exit::Usage, error).hint(hint));
    }
    let first = match &arguments.name {
        Some(name) => name.clone(),
        None => only_or_first()?,
    };
    reach::find_also_ended(Some(&first))?;
    let cannot = |error| {
        let error = anyhow::Error::new(error).context("cannot use the terminal");
        Failure::new(Exit::Failed, error)
    };
    reach::runtime()?.block_on(async {
        let signals = Signals::new()?;
        let mut session = Session::open().map_err(cannot)?;
        let watched = Watched::new(first).follow(&mut session, signals).await;
        // Restored before anything is printed.
        drop(session);
        watched.map_err(cannot)
    })
}

/// The first running cluster; an ended one is shown if it is named.
fn only_or_first() -> Result<ClusterName, Failure> {
    match cluster::find(None) {
        Ok(found) => Ok(found.name),
        Err(FindError::Several { running }) if !running.is_empty() => Ok(running[0].clone()),
        Err(error) => Err(reach::not_found(error)),
    }
}

/// What a key asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    Quit,
    /// To select the process so many rows below.
    Down(isize),
    /// To show the cluster so many places later.
    Next(isize),
}

impl Wish {
    fn of(key: KeyEvent) -> Option<Self> {
        if key.kind == KeyEventKind::Release {
            return None;
        }
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        Some(match key.code {
            KeyCode::Char('c') if control => Wish::Quit,
            _ if control => return None,
            KeyCode::Char('q') | KeyCode::Esc => Wish::Quit,
            KeyCode::Down | KeyCode::Char('j') => Wish::Down(1),
            KeyCode::Up | KeyCode::Char('k') => Wish::Down(-1),
            KeyCode::PageDown => Wish::Down(10),
            KeyCode::PageUp => Wish::Down(-10),
            KeyCode::Home => Wish::Down(isize::MIN),
            KeyCode::End => Wish::Down(isize::MAX),
            KeyCode::Tab | KeyCode::Right => Wish::Next(1),
            KeyCode::BackTab | KeyCode::Left => Wish::Next(-1),
            _ => return None,
        })
    }
}

/// A cluster that is being watched, and its place among those that run.
struct Watched {
    watch: Watch,
    picture: Picture,
    rows: TableState,
    /// Its place and their number.
    place: (usize, usize),
}

impl Watched {
    /// Needs an event loop.
    fn new(name: ClusterName) -> Self {
        let mut watched = Self {
            watch: Watch::open(&name, EVERY),
            picture: Picture::new(name),
            rows: TableState::new().with_selected(0),
            place: (0, 1),
        };
        watched.find_place(&running());
        watched
    }

    fn find_place(&mut self, running: &[ClusterName]) {
        let at = running.iter().position(|name| *name == self.picture.name);
        self.place = (at.unwrap_or(0), running.len() + usize::from(at.is_none()));
    }

    async fn follow(mut self, session: &mut Session, mut signals: Signals) -> io::Result<Exit> {
        let mut tick = tokio::time::interval(EVERY);
        loop {
            tokio::select! {
                update = self.watch.next() => match update {
                    Some(update) => {
                        self.picture.apply(update);
                        // What comes at the same time is drawn at the same time.
                        if self.watch.has_more() {
                            continue;
                        }
                    }
                    None => self.watch = Watch::open(&self.picture.name, EVERY),
                },
                event = session.events.recv() => match event {
                    Some(Ok(Event::Key(key))) => match Wish::of(key) {
                        Some(Wish::Quit) => return Ok(Exit::Done),
                        Some(wish) => self.grant(wish),
                        None => continue,
                    },
                    Some(Ok(_)) => {}
                    // The terminal has gone.
                    Some(Err(error)) => return Err(error),
                    None => return Ok(Exit::Done),
                },
                number = signals.next() => return Ok(Exit::Signal(number)),
                _ = tick.tick() => self.find_place(&running()),
            }
            let Self { picture, rows, place, .. } = &mut self;
            let (place, now) = (*place, SystemTime::now());
            session.draw(|frame, colour| {
                draw::draw(frame, &draw::View { picture, place, now, colour }, rows);
            })?;
        }
    }

    fn grant(&mut self, wish: Wish) {
        match wish {
            Wish::Quit => {}
            Wish::Down(by) => {
                let last = self.picture.processes().count().saturating_sub(1);
                let at = self.rows.selected().unwrap_or(0).saturating_add_signed(by);
                self.rows.select(Some(at.min(last)));
            }
            Wish::Next(by) => {
                let running = running();
                let at = running.iter().position(|name| *name == self.picture.name);
                let next = match at {
                    Some(at) => at.checked_add_signed(by).map_or(running.len() - 1, |next| next),
                    None => 0,
                };
                let next = running.get(next).or_else(|| running.first());
                if let Some(name) = next.filter(|name| **name != self.picture.name) {
                    *self = Self::new(name.clone());
                }
            }
        }
    }
}

/// The running clusters, by name. Those that can't be read are `ps`'s to report.
fn running() -> Vec<ClusterName> {
    let all = cluster::clusters().unwrap_or_default();
    all.running.into_iter().map(|found| found.name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_mean_what_the_help_says() {
        let wish = |code| Wish::of(KeyEvent::new(code, KeyModifiers::NONE));
        for code in [KeyCode::Char('q'), KeyCode::Esc] {
            assert_eq!(wish(code), Some(Wish::Quit));
        }
        let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(Wish::of(interrupt), Some(Wish::Quit));
        let other = KeyEvent::new(KeyCode::Char('q'), KeyModifiers::CONTROL);
        assert_eq!(Wish::of(other), None);
        assert_eq!([wish(KeyCode::Char('j')), wish(KeyCode::Down)], [Some(Wish::Down(1)); 2]);
        assert_eq!([wish(KeyCode::Char('k')), wish(KeyCode::Up)], [Some(Wish::Down(-1)); 2]);
        assert_eq!(wish(KeyCode::Tab), Some(Wish::Next(1)));
        assert_eq!(wish(KeyCode::Char('x')), None);
    }
}
