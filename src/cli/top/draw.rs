//! Draws a cluster on a screen of any size.
//!
//! Pure: the picture, the time and the size are arguments.
//!
//! *Invariant:* what a colour says is also said by a word or a number.

use std::time::{Duration, SystemTime};

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Paragraph, TableState};

use super::model::Picture;
use crate::cli::sanitize::plain;
use crate::cli::workers;
use crate::supervise::{ClusterPhase, ProcessPhase, Record, state};
use crate::units::{HumanBytes, HumanSpan};

/// What is drawn.
pub(super) struct View<'a> {
    pub(super) picture: &'a Picture,
    /// The cluster's place among those that run, and their number.
    pub(super) place: (usize, usize),
    pub(super) now: SystemTime,
    pub(super) colour: bool,
}

pub(super) const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);

/// Fewest lines for events, with their heading.
const EVENTS: u16 = 4;

/// Most lines about lanes and troubles.
const REMARKS: usize = 4;

/// Draws it.
pub(super) fn draw(frame: &mut Frame<'_>, view: &View<'_>, rows: &mut TableState) {
    let area = frame.area();
    let width = usize::from(area.width);
    let table = view.table(width);
    let remarks = view.remarks();
    let selected = view.selected(rows);
    let lines = |count: usize| u16::try_from(count).unwrap_or(u16::MAX);
    let around = 2 + lines(remarks.len()) + lines(selected.len()) + 1;
    let room = area.height.saturating_sub(around + EVENTS).max(2);
    let [head, middle, below, about, events, keys] = Layout::vertical([
        Constraint::Length(2),
        Constraint::Length(lines(table.rows.len() + 1).min(room)),
        Constraint::Length(lines(remarks.len())),
        Constraint::Length(lines(selected.len())),
        Constraint::Min(0),
        Constraint::Length(1),
    ])
    .areas(area);
    frame.render_widget(Paragraph::new(view.head(width)), head);
    frame.render_stateful_widget(table.widget(view.mark()), middle, rows);
    frame.render_widget(Paragraph::new(remarks), below);
    frame.render_widget(Paragraph::new(selected), about);
    view.events(frame, events);
    let shown = usize::from(middle.height.saturating_sub(1)).min(table.rows.len());
    let part = (shown < table.rows.len()).then(|| (rows.offset() + 1, rows.offset() + shown));
    frame.render_widget(view.keys(part, table.rows.len()), keys);
}

/// How good something is.
#[derive(Clone, Copy)]
pub(super) enum Tone {
    Good,
    Middling,
    Bad,
    Quiet,
}

impl View<'_> {
    /// The style of a tone; none without colours.
    fn tone(&self, tone: Tone) -> Style {
        let style = Style::new();
        match tone {
            _ if !self.colour => style,
            Tone::Good => style.fg(Color::Green),
            Tone::Middling => style.fg(Color::Yellow),
            Tone::Bad => style.fg(Color::Red).add_modifier(Modifier::BOLD),
            Tone::Quiet => style.fg(Color::DarkGray),
        }
    }

    pub(super) fn said(&self, text: impl Into<String>, tone: Tone) -> Span<'static> {
        Span::styled(text.into(), self.tone(tone))
    }

    /// The style of the selected row.
    fn mark(&self) -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }

    /// Two lines: what it is, and what it does in all.
    fn head(&self, width: usize) -> Vec<Line<'static>> {
        let name = Span::styled(self.picture.name.to_string(), BOLD);
        let Some(state) = &self.picture.state else {
            let text = self.picture.end.as_deref().unwrap_or("waiting for its state");
            return vec![Line::from(vec![name, Span::raw(format!("  {text}"))])];
        };
        let mut first = vec![name, Span::raw("  ")];
        match (&self.picture.end, &self.picture.silent) {
            (Some(how), _) => first.push(self.said(format!("ended: {how}"), Tone::Bad)),
            (None, Some(_)) => first.push(self.said("does not answer", Tone::Bad)),
            (None, None) => {
                let tone = match state.state {
                    ClusterPhase::Ready => Tone::Good,
                    ClusterPhase::Degraded | ClusterPhase::Failed => Tone::Bad,
                    _ => Tone::Middling,
                };
                first.push(self.said(state.state.to_string(), tone));
                if let Some(cause) = &state.cause {
                    first.push(Span::raw(format!(": {}", cause.text)));
                }
            }
        }
        let machine = self.picture.plan.as_ref().and_then(|plan| plan.machine.name.clone());
        let simulated = if state.simulated { "simulated GPUs" } else { "" };
        let up = self.since(&state.started_at).filter(|_| self.picture.end.is_none());
        let facts = [
            format!("{} engine", state.engine),
            machine.unwrap_or_default(),
            simulated.to_owned(),
            up.map(|up| format!("up {}", HumanSpan(up))).unwrap_or_default(),
        ];
        let facts: Vec<String> = facts.into_iter().filter(|fact| !fact.is_empty()).collect();
        vec![opposite(first, facts.join(", "), width), Line::from(self.sums())]
    }

    /// Time since an RFC 3339 time.
    pub(super) fn since(&self, at: &str) -> Option<Duration> {
        self.now.duration_since(humantime::parse_rfc3339(at).ok()?).ok()
    }

    fn sums(&self) -> String {
        let workers = || self.picture.state.iter().flat_map(|state| &state.workers);
        let ready = workers().filter(|worker| worker.state == ProcessPhase::Ready).count();
        let mut parts = vec![format!("{ready} of {} READY", workers().count())];
        let processes = &self.picture.figures.processes;
        if !processes.is_empty() {
            let cpus: f64 = processes.values().filter_map(|one| one.cpus).sum();
            let bytes = processes.values().filter_map(|one| one.resident_bytes).sum();
            parts.push(format!("CPU {}", percent(cpus)));
            parts.push(format!("memory {}", HumanBytes(bytes)));
        }
        if let Some(tasks) = &self.picture.figures.tasks {
            let sum = |of: fn(&crate::wire::tasks::WorkerOverview) -> u64| {
                tasks.workers.iter().map(of).sum::<u64>()
            };
            let mut text = format!("tasks {} in flight", sum(|worker| worker.in_flight));
            text.push_str(&format!(", {} queued", sum(|worker| worker.queued)));
            if let Some(rate) = self.picture.tasks_per_s {
                text.push_str(&format!(", {rate:.0}/s"));
            }
            parts.push(text);
        }
        parts.join("; ")
    }

    /// Lanes that are not as planned, NICs that carry something, and processes that are not well.
    fn remarks(&self) -> Vec<Line<'static>> {
        let Some(state) = &self.picture.state else { return Vec::new() };
        let mut lines = Vec::new();
        if let Some(why) = &self.picture.silent {
            lines.push(Line::from(self.said(why.clone(), Tone::Bad)));
        }
        lines.extend(self.lanes());
        let rate = |rate: f64| format!("{:.1} GB/s", rate / 1e9);
        let nics = self.picture.figures.nics.iter();
        let nics: Vec<String> = nics
            .map(|(name, [out, come])| format!("{name} {} out, {} in", rate(*out), rate(*come)))
            .collect();
        if !nics.is_empty() {
            lines.push(Line::from(format!("NICs: {}", nics.join("; "))));
        }
        lines.extend(workers::who_joined(state).map(Line::from));
        let mut troubles = workers::troubles(state);
        let more = (lines.len() + troubles.len()).saturating_sub(REMARKS);
        if more > 0 {
            troubles.truncate(troubles.len().saturating_sub(more + 1));
            troubles.push(format!("{} more: cuda-cluster ps {}", more + 1, state.name));
        }
        lines.extend(troubles.into_iter().map(|text| Line::from(self.said(text, Tone::Bad))));
        lines
    }

    fn lanes(&self) -> Option<Line<'static>> {
        let lanes = &self.picture.lanes;
        let all = lanes.pairs.len();
        let state = self.picture.state.as_ref().filter(|_| all > 0)?;
        if lanes.missing.is_empty() {
            return Some(Line::from(format!("lanes: all {all} connections have what is planned")));
        }
        let name = |at: usize| state.workers.get(at).map_or("?", |worker| worker.name.as_str());
        let missing = lanes.missing.iter();
        let each: Vec<String> = missing
            .map(|(from, to, lane)| format!("{} to {} lacks {lane}", name(*from), name(*to)))
            .collect();
        let text =
            format!("lanes: {} of {all} are not as planned: {}", each.len(), each.join(", "));
        Some(Line::from(self.said(text, Tone::Bad)))
    }

    /// More about the selected process.
    fn selected(&self, rows: &TableState) -> Vec<Line<'static>> {
        let at = rows.selected().unwrap_or(0);
        let Some(process) = self.picture.processes().nth(at) else { return Vec::new() };
        let mut parts = Vec::new();
        let host = process.host.iter();
        parts.extend(host.map(|host| format!("brings up the workers of {}", plain(host))));
        parts.extend(process.pid.map(|pid| format!("process {pid}")));
        parts.extend(
            process.last_exit.as_ref().map(|exit| {
                format!("last exit at {}: {}", state::time_of_day(&exit.at), exit.reason)
            }),
        );
        let planned = self.picture.planned(&process.name);
        let nics = planned.map(|worker| worker.nics.iter().map(ToString::to_string));
        let nics = nics.map(Iterator::collect::<Vec<_>>).filter(|nics| !nics.is_empty());
        parts.extend(nics.map(|nics| format!("NIC {}", nics.join(","))));
        parts.extend(process.cpus.as_ref().map(|cpus| format!("CPUs {cpus}")));
        let name = Span::styled(process.name.clone(), BOLD);
        vec![Line::from(vec![name, Span::raw(format!(": {}", parts.join(", ")))])]
    }

    fn events(&self, frame: &mut Frame<'_>, area: Rect) {
        let block = Block::new().borders(Borders::TOP).title(" events ");
        let room = usize::from(block.inner(area).height);
        let records = &self.picture.records;
        let last = records.iter().skip(records.len().saturating_sub(room));
        let line = |record: &Record| {
            let time = self.said(state::time_of_day(&record.at), Tone::Quiet);
            Line::from(vec![time, Span::raw(format!("  {}", workers::sentence(record)))])
        };
        let lines: Vec<Line<'static>> = last.map(line).collect();
        frame.render_widget(Paragraph::new(lines).block(block), area);
    }

    fn keys(&self, part: Option<(usize, usize)>, all: usize) -> Paragraph<'static> {
        let mut text = "q quit  ↑↓ select".to_owned();
        if self.place.1 > 1 {
            text.push_str(&format!("  Tab next of {} clusters", self.place.1));
        }
        if let Some((first, last)) = part {
            text.push_str(&format!("  processes {first} to {last} of {all}"));
        }
        Paragraph::new(Line::from(self.said(text, Tone::Quiet)))
    }
}

/// What stands on the left, and as much of what stands on the right as fits.
fn opposite(mut left: Vec<Span<'static>>, right: String, width: usize) -> Line<'static> {
    let taken: usize = left.iter().map(Span::width).sum();
    let length = Span::raw(right.as_str()).width();
    if let Some(gap) = width.checked_sub(taken + length).filter(|gap| *gap >= 2) {
        left.extend([Span::raw(" ".repeat(gap)), Span::raw(right)]);
    } else {
        left.push(Span::raw(format!("  {right}")));
    }
    Line::from(left)
}

pub(super) fn tone_of(phase: ProcessPhase) -> Tone {
    match phase {
        ProcessPhase::Ready => Tone::Good,
        ProcessPhase::Starting | ProcessPhase::Stopping => Tone::Middling,
        ProcessPhase::Restarting | ProcessPhase::Unresponsive | ProcessPhase::Failed => Tone::Bad,
        ProcessPhase::Waiting | ProcessPhase::Stopped => Tone::Quiet,
    }
}

/// CPUs in use, of which one is 100 %.
pub(super) fn percent(cpus: f64) -> String {
    format!("{:.0} %", cpus * 100.0)
}

pub(super) fn human(bytes: u64) -> String {
    HumanBytes(bytes).to_string()
}
