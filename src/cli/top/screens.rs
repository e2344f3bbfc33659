//! What `top` draws of clusters that are made up, as reviewed text.

use std::time::SystemTime;

use insta::assert_snapshot;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::style::{Color, Modifier};
use ratatui::widgets::TableState;
use serde_json::{Value, json};

use super::draw::{View, draw};
use super::model::Picture;
use crate::dashboard::Update;
use crate::plan::{Plan, plan};
use crate::topology;

fn planned(machine: &str) -> Plan {
    let machine = topology::parse(topology::builtin(machine).expect("built in"));
    let spec = crate::spec::parse("version: 1\nname: demo\n", "test").expect("right");
    let request = crate::spec::Request::of(spec).expect("right");
    plan(&machine.expect("a machine"), &request, &Default::default()).expect("a plan")
}

fn process(name: &str, gpu: Option<u32>, pid: u32) -> Value {
    json!({
        "name": name, "pid": pid, "state": "ready", "address": null, "restarts": 0,
        "gpu": gpu.map(|index| json!({ "index": index, "uuid": null, "pci": null })),
        "memory_limit_bytes": gpu.map(|_| 256u64 << 30),
        "cpus": "0-55", "mems": null, "asked": { "cpus": "0-55", "mems": null },
        "containment": "cgroup", "last_exit": null, "step": null, "peers": [],
        "log": "/run/log", "timings": { "bound_ms": 2, "ready_ms": 30 }, "notes": [],
    })
}

/// A cluster of so many workers on an 8-GPU machine with GPUs, at work: the third was killed.
fn at_work(workers: u32) -> Picture {
    let mut picture = Picture::new("demo".parse().expect("a name"));
    let mut all: Vec<Value> =
        (0..workers).map(|at| process(&format!("gpu{at}"), Some(at), 1000 + at)).collect();
    all[2]["restarts"] = json!(1);
    all[2]["last_exit"] = json!({
        "code": null, "signal": 9, "core_dumped": false, "pid": 900,
        "reason": "ended by signal 9 (SIGKILL)", "at": "2026-01-31T12:00:00.000Z", "bundle": null,
    });
    all[1]["missing_ports"] = json!([{ "port": "mlx5_1:1", "why": "it is DOWN" }]);
    let state = json!({
        "version": 1, "name": "demo", "engine": "native", "simulated": false, "state": "ready",
        "supervisor_pid": 10, "guardian_pid": 11, "started_at": "2026-01-31T11:56:00.000Z",
        "ready_after_ms": 100, "run_directory": "/run", "containment": "cgroup",
        "scheduler": process("scheduler", None, 12), "workers": all, "cause": null, "notes": [],
    });
    picture.apply(Update::State(serde_json::from_value(state).map(Box::new).expect("a state")));
    picture.plan = Some(planned("dgx-h100"));
    let lanes = json!({ "sets": ["cuda_ipc/cuda"], "pairs": [[0, 1, 0], [1, 0, 0]],
        "missing": [[0, 1, "cuda_ipc/cuda"]] });
    picture.apply(Update::Lanes(serde_json::from_value(lanes).expect("lanes")));
    for (at, finished) in [(1000, 100), (2000, 350)] {
        let names = (0..workers).map(|at| format!("gpu{at}"));
        let figures = |cpus: f64, bytes: u64| json!({ "cpus": cpus, "resident_bytes": bytes, "age_ms": 232_000 });
        let mut processes: serde_json::Map<String, Value> =
            names.clone().map(|name| (name, figures(1.53, 200 << 30))).collect();
        processes.insert("scheduler".to_owned(), figures(0.02, 24 << 20));
        let gauges = json!({
            "used_bytes": 60u64 << 30, "total_bytes": 80u64 << 30, "busy_percent": 97,
            "celsius": 61, "watts": 512.4, "nvlink_bytes": [null, null],
            "pcie_bytes": [null, null], "nvlink_bytes_per_s": [null, null],
            "pcie_bytes_per_s": [null, null],
        });
        let gpus: serde_json::Map<String, Value> =
            (0..workers).map(|at| (at.to_string(), gauges.clone())).collect();
        let counters: Vec<Value> = names
            .map(|name| {
                json!({ "name": name, "in_flight": 4, "queued": 1, "objects": 9,
                "finished": finished })
            })
            .collect();
        let figures = json!({
            "at": at, "processes": processes, "gpus": gpus,
            "nics": { "mlx5_0": [12.1e9, 3e9] },
            "tasks": { "workers": counters, "tasks": 1, "objects": 1, "recomputed": 0,
                "stolen": 0, "links": [], "functions": [], "waiting": [], "resident_bytes": 1 },
        });
        let figures = serde_json::from_value(figures).map(Box::new).expect("figures");
        picture.apply(Update::Figures(figures));
    }
    for (second, event) in [
        (1, json!({ "event": "started", "pid": 1000, "restarts": 0 })),
        (2, json!({ "event": "ready", "after_ms": 30 })),
        (
            3,
            json!({ "event": "exited", "exit": { "code": null, "signal": 9, "core_dumped": false },
            "reason": "ended by signal 9 (SIGKILL)" }),
        ),
        (4, json!({ "event": "started", "pid": 1002, "restarts": 1 })),
        (5, json!({ "event": "ready", "after_ms": 28 })),
    ] {
        let mut record = event;
        record["at"] = json!(format!("2026-01-31T12:00:0{second}.000Z"));
        record["process"] = json!("gpu2");
        picture.apply(Update::Event(serde_json::from_value(record).expect("a record")));
    }
    picture
}

/// A screen of this size, with this row selected.
fn screen(picture: &Picture, size: (u16, u16), row: usize, colour: bool) -> Terminal<TestBackend> {
    let mut terminal = Terminal::new(TestBackend::new(size.0, size.1)).expect("a screen");
    let now: SystemTime = humantime::parse_rfc3339("2026-01-31T12:00:09Z").expect("a time");
    let mut rows = TableState::new().with_selected(row);
    let view = View { picture, place: (0, 2), now, colour };
    terminal.draw(|frame| draw(frame, &view, &mut rows)).expect("drawn");
    terminal
}

fn text(terminal: &Terminal<TestBackend>) -> String {
    terminal.backend().to_string()
}

#[test]
fn eight_workers_on_a_screen_of_80_columns() {
    assert_snapshot!(text(&screen(&at_work(8), (80, 24), 3, true)));
}

#[test]
fn eight_workers_on_a_screen_of_120_columns() {
    assert_snapshot!(text(&screen(&at_work(8), (120, 40), 3, true)));
}

#[test]
fn simulated_gpus_have_no_empty_columns() {
    let mut picture = at_work(8);
    let mut figures = picture.figures.clone();
    figures.gpus.clear();
    figures.nics.clear();
    picture.apply(Update::Figures(Box::new(figures)));
    assert_snapshot!(text(&screen(&picture, (80, 24), 0, true)));
}

#[test]
fn the_selected_one_of_72_workers_is_on_the_screen() {
    let shown = text(&screen(&at_work(72), (80, 24), 70, true));
    assert!(shown.contains("gpu69"), "{shown}");
    assert!(shown.contains(" of 73"), "{shown}");
}

#[test]
fn a_screen_of_any_size_is_drawn() {
    let picture = at_work(8);
    for width in [1, 2, 10, 39, 60, 79, 100, 300] {
        for height in [1, 2, 5, 12, 100] {
            screen(&picture, (width, height), 8, true);
        }
    }
    screen(&Picture::new("demo".parse().expect("a name")), (80, 24), 0, true);
}

#[test]
fn a_cluster_that_has_ended_keeps_its_last_picture() {
    let mut picture = at_work(8);
    picture.apply(Update::End("failed: gpu2 ended".to_owned()));
    let shown = text(&screen(&picture, (80, 24), 0, true));
    assert!(shown.contains("ended: failed: gpu2 ended"), "{shown}");
    assert!(shown.contains("gpu7"), "{shown}");
}

#[test]
fn without_colours_there_is_none_and_the_text_is_the_same() {
    let picture = at_work(8);
    let (with, without) =
        (screen(&picture, (80, 24), 3, true), screen(&picture, (80, 24), 3, false));
    let cells = |terminal: &Terminal<TestBackend>| terminal.backend().buffer().content.clone();
    assert!(cells(&with).iter().any(|cell| cell.fg == Color::Red));
    for (coloured, plain) in cells(&with).iter().zip(&cells(&without)) {
        assert_eq!((plain.fg, plain.bg), (Color::Reset, Color::Reset));
        assert_eq!(coloured.symbol(), plain.symbol());
    }
    let reversed = |cell: &ratatui::buffer::Cell| cell.modifier.contains(Modifier::REVERSED);
    assert!(cells(&without).iter().any(reversed), "the selected row");
}
