//! The table of processes, which has less to say on a narrow screen.
//!
//! Pure, as all that draws.
//!
//! *Invariant:* every column but the name gives way before the table is wider than the screen.

use std::time::Duration;

use ratatui::layout::Constraint;
use ratatui::style::Style;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Row, Table};

use super::draw::{BOLD, Tone, View, human, percent, tone_of};
use crate::supervise::ProcessState;
use crate::units::HumanSpan;

/// A restart of the last seconds is pointed out.
const RECENT: Duration = Duration::from_secs(30);

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
pub(super) struct Processes {
    columns: Vec<Column>,
    widths: Vec<usize>,
    pub(super) rows: Vec<Vec<Line<'static>>>,
}

impl Processes {
    fn width(&self) -> usize {
        self.widths.iter().sum::<usize>() + self.widths.len().saturating_sub(1)
    }

    pub(super) fn widget(&self, mark: Style) -> Table<'static> {
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
    /// The table for a screen of this width.
    pub(super) fn table(&self, width: usize) -> Processes {
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
                self.amount(figures.resident_bytes, process.memory_limit_bytes, bar, limit)
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
}

fn is_empty(cell: &Line<'_>) -> bool {
    cell.spans.iter().all(|span| span.content == "-")
}
