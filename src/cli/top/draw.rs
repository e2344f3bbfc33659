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
use ratatui::widgets::{Block, Borders, Paragraph, Row, Table, TableState};

use super::model::Picture;
use crate::cli::workers;
use crate::supervise::{ClusterPhase, ProcessPhase, ProcessState, Record, state};
use crate::units::{HumanBytes, HumanSpan};

/// What is drawn.
pub(super) struct View<'a> {
    pub(super) picture: &'a Picture,
    /// The cluster's place among those that run, and their number.
    pub(super) place: (usize, usize),
    pub(super) now: SystemTime,
    pub(super) colour: bool,
}

const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);

/// A restart of the last seconds is pointed out.
const RECENT: Duration = Duration::from_secs(30);

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
enum Tone {
    Good,
    Middling,
    Bad,
    Quiet,
}

/// A column: its heading, whether its text ends on the right, and its least width.
#[derive(Clone, Copy)]
struct Column {
    heading: &'static str,
    right: bool,
    least: usize,
    cell: Cell,
}

/// What a column shows of a process.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cell {
    Name,
    State,
    Gpu,
    Cpu,
    /// With a bar of this width, and with or without the limit.
    Memory(usize, bool),
    GpuMemory(usize, bool),
    GpuUse,
    Celsius,
    Watts,
    Tasks,
    Restarts,
    Uptime,
    Pid,
}

const fn column(heading: &'static str, right: bool, least: usize, cell: Cell) -> Column {
    Column { heading, right, least, cell }
}

/// All columns, in their order.
const COLUMNS: [Column; 13] = [
    column("PROCESS", false, 9, Cell::Name),
    column("STATE", false, 10, Cell::State),
    column("GPU", true, 3, Cell::Gpu),
    column("CPU", true, 5, Cell::Cpu),
    column("MEMORY", false, 0, Cell::Memory(8, true)),
    column("GPU MEMORY", false, 0, Cell::GpuMemory(8, true)),
    column("USE", true, 5, Cell::GpuUse),
    column("TEMP", true, 5, Cell::Celsius),
    column("POWER", true, 5, Cell::Watts),
    column("TASKS", true, 5, Cell::Tasks),
    column("RESTARTS", true, 8, Cell::Restarts),
    column("UPTIME", true, 6, Cell::Uptime),
    column("PID", true, 7, Cell::Pid),
];

/// What a narrow screen does without, first to last.
const LESS: [Less; 10] = [
    Less::Column("PID"),
    Less::Limits,
    Less::Column("POWER"),
    Less::Column("UPTIME"),
    Less::Column("TEMP"),
    Less::Bars(5),
    Less::Column("GPU"),
    Less::Bars(0),
    Less::Column("TASKS"),
    Less::Column("STATE"),
];

#[derive(Clone, Copy)]
enum Less {
    Column(&'static str),
    /// The bars are so wide.
    Bars(usize),
    /// Limits are not written out; the bars show them.
    Limits,
}

/// The processes.
struct Processes {
    columns: Vec<Column>,
    widths: Vec<usize>,
    rows: Vec<Vec<Line<'static>>>,
}

impl Processes {
    fn width(&self) -> usize {
        self.widths.iter().sum::<usize>() + self.widths.len().saturating_sub(1)
    }

    fn widget(&self, mark: Style) -> Table<'static> {
        let aligned = |at: usize, line: Line<'static>| match self.columns[at].right {
            true => line.right_aligned(),
            false => line,
        };
        let cells = |row: &Vec<Line<'static>>| {
            Row::new(row.iter().cloned().enumerate().map(|(at, line)| aligned(at, line)))
        };
        let headings = self.columns.iter().enumerate();
        let headings =
            headings.map(|(at, column)| aligned(at, Line::from(column.heading).style(BOLD)));
        let widths = self.widths.iter().map(|width| u16::try_from(*width).unwrap_or(u16::MAX));
        Table::new(self.rows.iter().map(cells), widths.map(Constraint::Length))
            .header(Row::new(headings))
            .column_spacing(1)
            .row_highlight_style(mark)
    }
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

    fn said(&self, text: impl Into<String>, tone: Tone) -> Span<'static> {
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
    fn since(&self, at: &str) -> Option<Duration> {
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

    /// The table for a screen of this width.
    fn table(&self, width: usize) -> Processes {
        let processes: Vec<&ProcessState> = self.picture.processes().collect();
        let mut columns: Vec<Column> = COLUMNS.to_vec();
        // A column that would be empty is left out.
        columns.retain(|column| {
            matches!(column.cell, Cell::Name | Cell::State | Cell::Cpu | Cell::Memory(..))
                || processes.iter().any(|process| !is_empty(&self.cell(process, column.cell)))
        });
        let mut table = self.laid_out(&processes, columns);
        for less in LESS {
            if table.width() <= width {
                break;
            }
            let mut columns = table.columns;
            match less {
                Less::Column(heading) => columns.retain(|column| column.heading != heading),
                Less::Bars(_) | Less::Limits => columns.iter_mut().for_each(|column| {
                    if let Cell::Memory(bar, limit) | Cell::GpuMemory(bar, limit) = &mut column.cell
                    {
                        match less {
                            Less::Bars(width) => *bar = width,
                            _ => *limit = false,
                        }
                    }
                }),
            }
            table = self.laid_out(&processes, columns);
        }
        table
    }

    fn laid_out(&self, processes: &[&ProcessState], columns: Vec<Column>) -> Processes {
        let row = |process: &&ProcessState| {
            columns.iter().map(|column| self.cell(process, column.cell)).collect()
        };
        let rows: Vec<Vec<Line<'static>>> = processes.iter().map(row).collect();
        let width = |at: usize, column: &Column| {
            let cells = rows.iter().map(|row| row[at].width());
            cells.max().unwrap_or(0).max(column.least).max(column.heading.len())
        };
        let widths = columns.iter().enumerate().map(|(at, column)| width(at, column)).collect();
        Processes { widths, rows, columns }
    }

    fn cell(&self, process: &ProcessState, cell: Cell) -> Line<'static> {
        let figures = self.picture.figures.of(process);
        let gauges = self.picture.figures.gauges(process);
        let plain = |text: Option<String>| Line::from(text.unwrap_or_else(|| "-".to_owned()));
        match cell {
            Cell::Name => Line::from(process.name.clone()),
            Cell::State => Line::from(self.said(process.state.to_string(), tone_of(process.state))),
            Cell::Gpu => plain(process.gpu.as_ref().map(|gpu| gpu.index.to_string())),
            Cell::Cpu => plain(figures.cpus.map(percent)),
            Cell::Memory(bar, limit) => {
                let planned = self.picture.planned(&process.name);
                let most = planned.and_then(|worker| worker.memory_limit_bytes);
                self.amount(figures.resident_bytes, most, bar, limit)
            }
            Cell::GpuMemory(bar, limit) => match (gauges, process.device_pool) {
                (Some(gauges), _) => self.amount(gauges.used_bytes, gauges.total_bytes, bar, limit),
                (None, Some(pool)) => {
                    let planned = self.picture.planned(&process.name);
                    let most = planned.and_then(|worker| worker.device_memory_limit_bytes);
                    self.amount(Some(pool.used_bytes), most, bar, limit)
                }
                (None, None) => plain(None),
            },
            Cell::GpuUse => {
                plain(gauges.and_then(|gauges| Some(format!("{} %", gauges.busy_percent?))))
            }
            Cell::Celsius => {
                plain(gauges.and_then(|gauges| Some(format!("{} °C", gauges.celsius?))))
            }
            Cell::Watts => plain(gauges.and_then(|gauges| Some(format!("{:.0} W", gauges.watts?)))),
            Cell::Tasks => {
                let tasks = self.picture.tasks(&process.name);
                plain(tasks.map(|tasks| tasks.in_flight.to_string()))
            }
            Cell::Restarts => self.restarts(process),
            Cell::Uptime => {
                let age = figures.age_ms.map(Duration::from_millis);
                plain(age.map(|age| format!("{:#}", HumanSpan(age))))
            }
            Cell::Pid => plain(process.pid.map(|pid| pid.to_string())),
        }
    }

    fn restarts(&self, process: &ProcessState) -> Line<'static> {
        let text = process.restarts.to_string();
        let ago = process.last_exit.as_ref().and_then(|exit| self.since(&exit.at));
        match ago.is_some_and(|ago| ago < RECENT) && process.restarts > 0 {
            true => Line::from(self.said(text, Tone::Bad)),
            false => Line::from(text),
        }
    }

    /// An amount of memory, as a bar where there is a limit.
    fn amount(
        &self,
        used: Option<u64>,
        most: Option<u64>,
        bar: usize,
        limit: bool,
    ) -> Line<'static> {
        let Some(used) = used else { return Line::from("-") };
        let most = most.filter(|most| *most > 0);
        let share = most.map_or(0.0, |most| used as f64 / most as f64).min(1.0);
        let mut spans = Vec::new();
        if bar > 0 {
            // At most the bar's width.
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
            let full = (share * bar as f64).round() as usize;
            let tone = match share {
                share if share >= 0.9 => Tone::Bad,
                share if share >= 0.75 => Tone::Middling,
                _ => Tone::Good,
            };
            let empty = if most.is_some() { "░" } else { " " };
            spans.push(self.said("█".repeat(full), tone));
            spans.push(self.said(empty.repeat(bar - full), Tone::Quiet));
            spans.push(Span::raw(" "));
        }
        let text = match most {
            Some(most) if limit => format!("{:>9} of {}", human(used), human(most)),
            _ => format!("{:>9}", human(used)),
        };
        spans.push(Span::raw(text));
        Line::from(spans)
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

fn tone_of(phase: ProcessPhase) -> Tone {
    match phase {
        ProcessPhase::Ready => Tone::Good,
        ProcessPhase::Starting | ProcessPhase::Stopping => Tone::Middling,
        ProcessPhase::Restarting | ProcessPhase::Unresponsive | ProcessPhase::Failed => Tone::Bad,
        ProcessPhase::Waiting | ProcessPhase::Stopped => Tone::Quiet,
    }
}

fn is_empty(cell: &Line<'_>) -> bool {
    cell.spans.iter().all(|span| span.content == "-")
}

/// CPUs in use, of which one is 100 %.
fn percent(cpus: f64) -> String {
    format!("{:.0} %", cpus * 100.0)
}

fn human(bytes: u64) -> String {
    HumanBytes(bytes).to_string()
}
