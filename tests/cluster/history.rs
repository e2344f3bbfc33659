//! What is known of hours in which nobody looked.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::time::{Duration, SystemTime};

use cuda_cluster::topology;
use cuda_cluster::wire::history::{Figure, History, Rings, Shape, Span, State, pairs};
use serde_json::{Value, json};

use super::browser::Browser;
use super::dashboard::{EIGHT, Served, down};
use super::fake_machine::FakeMachine;
use super::sandbox::{Sandbox, eventually};

const HOUR: u64 = 3_600_000;

/// A cluster that has ended without a word, and of which files are left.
fn ended(sandbox: &Sandbox, name: &str, workers: &str) {
    let up = ["--n-workers", workers, "--name", name, "--detach"];
    let up = sandbox.run(&[&EIGHT[..], &up].concat());
    assert_eq!(up.code, 0, "{up}");
    sandbox.kill(sandbox.state(name)["supervisor_pid"].as_u64().expect("a pid"));
    eventually("its end", Duration::from_secs(60), || sandbox.pids().is_empty());
    assert!(sandbox.try_state(name).is_none());
}

fn history(sandbox: &Sandbox, name: &str) -> Option<History> {
    let bytes = fs::read(sandbox.base().join(name).join("history")).ok()?;
    Some(History::read(&bytes).expect("a history"))
}

#[test]
fn the_history_grows_while_nobody_looks_and_survives_the_supervisors_violent_end() {
    let sandbox = Sandbox::new();
    let up = ["--n-workers", "2", "--name", "alone", "--detach"];
    let up = sandbox.run(&[&EIGHT[..], &up].concat());
    assert_eq!(up.code, 0, "{up}");
    let pid = sandbox.state("alone")["workers"][1]["pid"].as_u64().expect("a pid");
    eventually("a history", Duration::from_secs(60), || history(&sandbox, "alone").is_some());
    let before = sandbox.pids().len();
    sandbox.kill(pid);
    let restarted = |history: &History| {
        let curves = history.curves(None, None, 100);
        curves.processes[2].restarts.last() == Some(&Some(1)) && curves.at.len() > 2
    };
    eventually("a restart in it", Duration::from_secs(90), || {
        history(&sandbox, "alone").as_ref().is_some_and(restarted)
    });
    assert_eq!(sandbox.pids().len(), before, "nobody else was needed");
    let mode = fs::metadata(sandbox.base().join("alone/history")).expect("a file").permissions();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode) & 0o777, 0o600);

    sandbox.kill(sandbox.state("alone")["supervisor_pid"].as_u64().expect("a pid"));
    eventually("its end", Duration::from_secs(60), || sandbox.pids().is_empty());
    let curves = history(&sandbox, "alone").expect("it is left").curves(None, None, 100);
    let names: Vec<&str> = curves.processes.iter().map(|one| one.name.as_str()).collect();
    assert_eq!(names, ["scheduler", "gpu0", "gpu1"]);
    assert_eq!(curves.phases[usize::from(curves.processes[1].phase[0].expect("known"))], "ready");
    let figures = &curves.processes[1].figures;
    for known in ["cpus", "resident_bytes", "device_bytes", "spilled_bytes", "connections"] {
        assert!(figures[known].mean.iter().flatten().next().is_some(), "{known}: {figures:?}");
    }
    let said = sandbox.run(&["history", "alone"]);
    assert_eq!(said.code, 0, "{said}");
    assert!(said.stdout.contains("resident_bytes") && said.stdout.contains("gpu1"), "{said}");
    let report = sandbox.run(&["report", "alone", "-f", "-"]);
    assert_eq!(report.code, 0, "{report}");
    let report: Value = serde_json::from_str(&report.stdout).expect("JSON");
    assert_eq!(report["history"]["processes"][2]["name"], "gpu1");
}

#[test]
fn how_busy_a_gpu_was_is_known_later_and_of_a_simulated_one_nothing() {
    let sandbox = Sandbox::new();
    let folder = tempfile::tempdir().expect("a directory");
    let machine = topology::parse(topology::builtin("rtx-4090-2").expect("built in"));
    let fake = FakeMachine::write(&machine.expect("a machine"), folder.path()).expect("written");
    let busy = folder.path().join("busy");
    fs::write(&busy, "0 40\n").expect("written");
    let fake = fake.with_faults(&format!("busy={}", busy.display()));
    let spec = folder.path().join("spec.yaml");
    let text = "version: 1\nname: real\nengine: command\ndisplay_gpus: use\n\
                command: {argv: [sleep, '1000']}\n";
    fs::write(&spec, text).expect("written");
    let mut up = fake.command();
    up.args(["up", "--detach", "-f"]).arg(&spec);
    let up = sandbox.spawn_program(up).wait();
    assert_eq!(up.code, 0, "{up}");
    // By place: the first GPU computes, the second is idle.
    let busy_of = |worker: usize| {
        let curves = history(&sandbox, "real")?.curves(None, None, 100);
        let figures = &curves.processes[worker].figures["gpu_busy_percent"];
        let mean: Vec<f64> = figures.mean.iter().flatten().copied().collect();
        (!mean.is_empty()).then_some(mean)
    };
    eventually("what NVML told", Duration::from_secs(90), || busy_of(0).is_some());
    assert!(busy_of(0).expect("known").iter().all(|percent| *percent == 40.0));
    assert!(busy_of(1).expect("known").iter().all(|percent| *percent == 0.0), "idle, and known");
    let said = sandbox.run(&["history", "real"]);
    assert!(said.stdout.contains("gpu_busy_percent") && said.stdout.contains("40 %"), "{said}");
    down(&sandbox, "real");

    let up = ["--n-workers", "1", "--name", "made-up", "--detach"];
    let up = sandbox.run(&[&EIGHT[..], &up].concat());
    assert_eq!(up.code, 0, "{up}");
    eventually("a history", Duration::from_secs(60), || history(&sandbox, "made-up").is_some());
    let known = history(&sandbox, "made-up").expect("a history");
    assert!(!known.shape().figures.contains(&"gpu_busy_percent".to_owned()), "{known:?}");
    down(&sandbox, "made-up");
    sandbox.assert_nothing_is_left();
}

/// What each worker has received from its peers, by what it says now.
fn received(sandbox: &Sandbox, name: &str) -> BTreeMap<String, u64> {
    let state = sandbox.state(name);
    let workers = state["workers"].as_array().expect("workers").iter();
    let of = |worker: &Value| {
        let bytes = worker["work"]["received_bytes"].as_u64().expect("it counts them");
        (worker["name"].as_str().expect("a name").to_owned(), bytes)
    };
    workers.map(of).filter(|(_, bytes)| *bytes > 0).collect()
}

/// The same by the history.
fn recorded(sandbox: &Sandbox, name: &str) -> BTreeMap<String, u64> {
    let file = sandbox.base().join(name).join("history-pairs");
    let Ok(bytes) = fs::read(file) else { return BTreeMap::new() };
    let history = pairs::History::read(&bytes).expect("a history of pairs");
    let mut sums = BTreeMap::new();
    for flow in history.flows(None, None).pairs {
        assert_ne!(flow.from, flow.to);
        *sums.entry(flow.to).or_default() += flow.bytes;
    }
    sums
}

#[test]
fn what_went_from_which_worker_to_which_is_known_after_the_end() {
    let sandbox = Sandbox::new();
    let up = ["--n-workers", "3", "--name", "moved", "--detach"];
    let up = sandbox.run(&[&EIGHT[..], &up].concat());
    assert_eq!(up.code, 0, "{up}");
    let bench = || {
        let bench = ["bench", "transpose", "moved", "--chunks", "6", "--chunk-size", "256"];
        let bench = sandbox.run(&[&bench[..], &["--runs", "2"]].concat());
        assert_eq!(bench.code, 0, "{bench}");
    };
    bench();
    let said = received(&sandbox, "moved");
    assert_eq!(said.len(), 3, "each has received something: {said:?}");
    eventually("all that was said", Duration::from_secs(60), || {
        recorded(&sandbox, "moved") == said
    });

    // A worker that is replaced counts from zero, and what the one before it had is still known.
    let pid = sandbox.state("moved")["workers"][1]["pid"].as_u64().expect("a pid");
    sandbox.kill(pid);
    eventually("its successor", Duration::from_secs(60), || {
        let worker = &sandbox.state("moved")["workers"][1];
        worker["state"] == "ready" && worker["pid"] != pid
    });
    bench();
    let mut all = received(&sandbox, "moved");
    *all.entry("gpu1".to_owned()).or_default() += said["gpu1"];
    eventually("what was said since", Duration::from_secs(60), || {
        recorded(&sandbox, "moved") == all
    });
    let total: u64 = all.values().sum();

    sandbox.kill(sandbox.state("moved")["supervisor_pid"].as_u64().expect("a pid"));
    eventually("its end", Duration::from_secs(60), || sandbox.pids().is_empty());
    let told = sandbox.run(&["history", "moved"]);
    assert_eq!(told.code, 0, "{told}");
    for pair in ["gpu0 → gpu1  ", "gpu1 → gpu2  ", "gpu2 → gpu0  "] {
        let line = told.stdout.lines().find(|line| line.contains(pair)).expect("a line");
        assert!(line.contains("/s mean, ") && line.contains("/s highest, "), "{line}");
    }
    let json = sandbox.run(&["history", "moved", "-o", "json"]);
    let json: Value = serde_json::from_str(&json.stdout).expect("JSON");
    let report = sandbox.run(&["report", "moved", "-f", "-"]);
    let report: Value = serde_json::from_str(&report.stdout).expect("JSON");
    for pairs in [&json["pairs"], &report["pairs"]["pairs"]] {
        let pairs = pairs.as_array().expect("pairs");
        assert_eq!(pairs.len(), 6, "{pairs:?}");
        let sum: u64 = pairs.iter().map(|pair| pair["bytes"].as_u64().expect("bytes")).sum();
        assert_eq!(sum, total);
        let rate = |pair: &Value, which: &str| pair[which].as_u64().expect("a rate");
        assert!(pairs.iter().all(|pair| {
            let mean = rate(pair, "mean_bytes_per_s");
            mean > 0 && mean <= rate(pair, "highest_bytes_per_s")
        }));
    }

    // What cannot be read is said, and the rest is still shown.
    fs::write(sandbox.base().join("moved/history-pairs"), "none").expect("written");
    let told = sandbox.run(&["history", "moved"]);
    assert!(told.code == 0 && told.stdout.contains("gpu1"), "{told}");
    let note = "note: what went between workers is left out: cannot use ";
    assert!(told.stderr.contains(note) && told.stderr.contains("moved/history-pairs"), "{told}");
}

#[test]
fn what_workers_received_just_before_the_end_is_known_too() {
    let sandbox = Sandbox::new();
    let spec = "version: 1\nname: short\nsupervision: {restart: never}\n";
    let folder = tempfile::tempdir().expect("a directory");
    let file = folder.path().join("spec.yaml");
    fs::write(&file, spec).expect("written");
    let up = ["--n-workers", "2", "--detach", "-f", file.to_str().expect("a path")];
    let up = sandbox.run(&[&EIGHT[..], &up].concat());
    assert_eq!(up.code, 0, "{up}");
    let bench = ["bench", "transpose", "short", "--chunks", "4", "--chunk-size", "256"];
    let bench = sandbox.run(&[&bench[..], &["--runs", "1"]].concat());
    assert_eq!(bench.code, 0, "{bench}");
    // Nobody asks the workers again.
    let scheduler = fs::read_to_string(sandbox.base().join("short/state.json")).expect("a state");
    let scheduler: Value = serde_json::from_str(&scheduler).expect("JSON");
    sandbox.kill(scheduler["scheduler"]["pid"].as_u64().expect("a pid"));
    eventually("its end", Duration::from_secs(60), || sandbox.pids().is_empty());
    // A chunk is 256 × 256 numbers of four bytes at least, and two workers exchange some.
    let all = recorded(&sandbox, "short");
    assert!(all.len() == 2 && all.values().all(|bytes| *bytes >= 4 * 256 * 256), "{all:?}");
    sandbox.assert_only_the_causes_are_left("short");
}

#[test]
fn the_page_shows_the_means_of_pairs_in_any_part_of_the_time_also_after_the_end() {
    let Some(browser) = Browser::start() else { return };
    let sandbox = Sandbox::new();
    ended(&sandbox, "gone", "3");
    let names = ["gpu0", "gpu1", "gpu2"].map(str::to_owned).to_vec();
    let end = now();
    // In two hours gpu0 sends 3 MB/s to gpu1, and in the last half hour gpu2 also 12 MB/s to gpu0.
    made(&sandbox, "gone", &names, end, 2, |_, _| Some(1.0));
    let mut rings = pairs::Rings::new(pairs::Shape::new(names));
    let file = fs::File::create(sandbox.base().join("gone/history-pairs")).expect("a file");
    file.write_all_at(rings.header(), 0).expect("written");
    for step in 1..=240 {
        let pair = |from, to, rate: u16| pairs::Pair {
            from,
            to,
            bytes: u64::from(rate) * 30_000_000,
            highest: f32::from(rate) * 1e6,
        };
        let late = (step > 180).then(|| pair(2, 0, 12));
        let at = end - 2 * HOUR + step * 30_000;
        let pairs = [pair(0, 1, 3)].into_iter().chain(late).collect();
        for (place, record) in rings.add(&pairs::Span { at, ms: 30_000, pairs }) {
            file.write_all_at(&record, place).expect("written");
        }
    }

    let served = Served::start(&sandbox);
    browser.look_like(1440, "light");
    browser.open(&format!("{}&cluster=gone", served.link));
    // Nothing else is known of pairs, so this is shown by itself: all of it, as of the charts.
    let pressed = "document.querySelector('.choice button[aria-pressed=true]')?.textContent ?? ''";
    browser.wait_for(&format!("{pressed} === 'history: since the start'"));
    let values = "[...document.querySelectorAll('#matrix .value')].map((one) => one.textContent).filter(Boolean).join()";
    browser.wait_for(&format!("{values} === '3.0,3.0'"));
    let legend = "document.querySelector('#matrix .legend').textContent";
    browser
        .wait_for(&format!("/^means from .* \\d+:\\d\\d:\\d\\d to .*\\d,MB\\/s,/.test({legend})"));
    browser.wait_for(&format!("{legend}.includes('nothing was moved')"));
    // Of the last hour the other pair's mean is twice that.
    browser.click("[data-range='1h']");
    browser.wait_for(&format!("{pressed} === 'history: last hour'"));
    browser.wait_for(&format!("{values} === '3.0,6.0'"));
    let cell = "[...document.querySelectorAll('#matrix .cell')].at(-2)";
    browser.script(&format!("{cell}.dispatchEvent(new MouseEvent('click', {{ bubbles: true }}))"));
    let pair = "document.querySelector('#pair').textContent";
    browser.wait_for(&format!("{pair}.startsWith('gpu2 → gpu0: ')"));
    browser.wait_for(&format!("{pair}.includes('6 MB/s mean, 12 MB/s highest, 20.1 GiB from ')"));
    browser.picture("history-pairs-1440-light");
    // A part in which it had not begun, by its address.
    let (since, until) = (end - 2 * HOUR, end - HOUR);
    browser.script(&format!("location.hash = '#cluster=gone&since={since}&until={until}'"));
    browser.wait_for(&format!("{pressed} === 'history: chosen time'"));
    browser.wait_for(&format!("{values} === '3.0'"));
    browser.look_like(390, "dark");
    browser.assert_it_fits("at 390");
    assert_eq!(browser.errors(), [""; 0]);
    // What cannot be read is said.
    fs::write(sandbox.base().join("gone/history-pairs"), "none").expect("written");
    browser.click("[data-range='1h']");
    let answer = "document.querySelector('#pairs-answer').textContent";
    browser.wait_for(&format!(
        "/what went between them is not known: cannot use .*history-pairs/.test({answer})"
    ));
    served.end();
}

/// A clock's hours of a cluster: each worker's memory in GiB every ten seconds, `None` while it is
/// not there.
fn made(
    sandbox: &Sandbox,
    name: &str,
    names: &[String],
    end: u64,
    hours: u64,
    memory: impl Fn(usize, u64) -> Option<f64>,
) {
    let figures = ["cpus", "resident_bytes", "tasks_per_s", "gpu_busy_percent"];
    let figures = figures.map(str::to_owned).to_vec();
    let mut rings = Rings::new(Shape::new(names.to_vec(), figures));
    let path = sandbox.base().join(name).join("history");
    let file = fs::File::create(path).expect("a file");
    file.write_all_at(rings.header(), 0).expect("written");
    let mut restarts = vec![0; names.len()];
    let mut was_up = vec![true; names.len()];
    for step in 1..=hours * 360 {
        let at = end - hours * HOUR + step * 10_000;
        let mut span = Span { at, ms: 10_000, states: Vec::new(), figures: Vec::new() };
        for worker in 0..names.len() {
            let used = memory(worker, step);
            restarts[worker] += u16::from(used.is_some() && !was_up[worker]);
            was_up[worker] = used.is_some();
            let (phase, up) = if used.is_some() { (2, 100) } else { (5, 0) };
            span.states.push(State { phase, up, restarts: restarts[worker] });
            let bytes = used.map(|gib| gib * f64::from(1 << 30));
            // The scheduler has no GPU, and the others' are idle.
            let busy = used.map(|_| 0.0).filter(|_| worker > 0);
            let figures = [used.map(|_| 0.5), bytes, used.map(|_| 3.0), busy];
            span.figures.extend(figures.map(Figure::of));
        }
        for (place, record) in rings.add(&span) {
            file.write_all_at(&record, place).expect("written");
        }
    }
}

fn now() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
    u64::try_from(now.as_millis()).expect("a number")
}

#[test]
fn a_page_alone_tells_how_three_workers_died_in_an_hour_in_which_nobody_looked() {
    let Some(browser) = Browser::start() else { return };
    let sandbox = Sandbox::new();
    ended(&sandbox, "night", "4");
    // gpu1 fills its memory for ten minutes until it is killed, and gpu2 and gpu3 die later. Each
    // is away for a minute.
    let end = now();
    let deaths = [(1, 120), (2, 200), (3, 300)];
    let names: Vec<String> =
        ["scheduler", "gpu0", "gpu1", "gpu2", "gpu3"].map(str::to_owned).to_vec();
    made(&sandbox, "night", &names, end, 1, |process, step| {
        let died = deaths.iter().find(|(worker, _)| worker + 1 == process).map(|(_, at)| *at);
        match died {
            Some(at) if (at..at + 6).contains(&step) => None,
            Some(120) if (60..120).contains(&step) => Some(1.0 + (step - 60) as f64),
            _ => Some(1.0),
        }
    });
    let events = sandbox.base().join("night/events.jsonl");
    let mut text = fs::read_to_string(&events).expect("events");
    for (worker, step) in deaths {
        let at = SystemTime::UNIX_EPOCH + Duration::from_millis(end - HOUR + step * 10_000 - 3000);
        let record = json!({
            "at": humantime::format_rfc3339_millis(at).to_string(), "process": format!("gpu{worker}"),
            "event": "exited", "pid": 4711, "signal": 9, "exit": { "signal": 9 },
            "reason": format!("killed by the kernel, number {worker}"), "bundle": null,
        });
        text.push_str(&format!("{record}\n"));
    }
    fs::write(&events, text).expect("written");

    let served = Served::start(&sandbox);
    browser.look_like(1440, "light");
    browser.open(&format!("{}&cluster=night", served.link));
    // Of an ended cluster, all that is known is shown by itself.
    browser
        .wait_for("document.querySelector('#past .chart[aria-label=\"Resident memory\"] canvas')");
    browser.wait_for("document.querySelector('#time-title').textContent === 'Since the start'");
    browser.wait_for("document.querySelector('#past .chart[aria-label=\"Processes\"] canvas')");
    // That a GPU was idle is an answer, too.
    browser.wait_for("document.querySelector('#past .chart[aria-label=\"GPU use\"] canvas')");
    browser.picture("history-1440-light");

    // The cause: the first death is chosen by its event, and its worker's memory is told.
    browser.script(
        "[...document.querySelectorAll('#events li')].find((one) => one.textContent.includes('number 1')).click()",
    );
    browser.wait_for("document.querySelector('#events li.chosen')?.textContent.includes('gpu1')");
    browser.wait_for(
        "document.querySelector('#moment').textContent.includes('Resident memory: 60.0 GiB, GPU use: 0 %')",
    );
    browser.wait_for("/&at=/.test(location.hash)");
    // The arrow keys go on to the others; the newest is on top.
    browser.script("document.querySelector('#events').focus()");
    browser.press("\u{e013}");
    browser
        .wait_for("document.querySelector('#events li.chosen')?.textContent.includes('number 2')");
    browser.wait_for(
        "document.querySelector('#moment').textContent.includes('Resident memory: 1.0 GiB')",
    );
    // The curves' figures are those of that moment, and not of the end.
    browser.wait_for(
        "(() => { const clock = /\\d+:\\d\\d:\\d\\d/; const told = document.querySelector('#moment').textContent.match(/ at (\\d+:\\d\\d:\\d\\d)/)[1]; const ends = (text) => text.split(':').reduce((sum, part) => sum * 60 + +part, 0); return [...document.querySelectorAll('#past .u-legend .u-series:first-child')].every((one) => Math.abs(ends(one.textContent.match(clock)[0]) - ends(told)) <= 10); })()",
    );
    browser.picture("history-chosen-1440-light");

    // The reverse: a moment in a curve leads to its event.
    let over = "const over = document.querySelector('#past .chart[aria-label=\"Resident memory\"] .u-over'); \
        const { left, top, width, height } = over.getBoundingClientRect(); \
        const mouse = (kind, share) => over.dispatchEvent(new MouseEvent(kind, \
            { bubbles: true, movementX: 5, clientX: left + width * share, clientY: top + height / 2 }));";
    browser.script(&format!("{over} mouse('mousemove', 0.83); mouse('mousedown', 0.83); mouse('mouseup', 0.83); mouse('click', 0.83);"));
    browser
        .wait_for("document.querySelector('#events li.chosen')?.textContent.includes('number 3')");

    // A part that is dragged over is shown alone, and finer; it can be passed on as a link.
    browser.script(&format!("{over} mouse('mousemove', 0.3); mouse('mousedown', 0.3); mouse('mousemove', 0.4); mouse('mouseup', 0.4);"));
    browser.wait_for("/since=\\d+&until=\\d+/.test(location.hash)");
    browser.wait_for("document.querySelector('#hold').textContent === 'Go on'");
    browser.wait_for("document.querySelector('#time-since').textContent.includes('every 10 s')");
    let link = browser.script("return location.href");
    let heading = browser.script("return document.querySelector('#time-title').textContent");
    browser.open("about:blank");
    browser.open(link.as_str().expect("an address"));
    browser.wait_for("document.querySelector('#past canvas')");
    browser.wait_for(&format!("document.querySelector('#time-title').textContent === {heading}"));
    browser
        .wait_for("document.querySelector('#events li.chosen')?.textContent.includes('number 3')");
    // What the part does not show of the chosen event is not told.
    let told = browser.script("return document.querySelector('#moment').textContent");
    assert!(!told.as_str().is_some_and(|told| told.contains("Resident memory")), "{told}");
    browser.picture("history-part-1440-light");

    // One worker's means and peaks.
    browser.script("const who = document.querySelector('#who'); who.value = 'gpu1'; who.dispatchEvent(new Event('change'))");
    browser.wait_for("document.querySelector('#past .chart[aria-label=\"Resident memory\"] .u-legend')?.textContent.includes('peaks')");
    browser.click("#hold");
    browser.wait_for("document.querySelector('#time-title').textContent === 'Since the start' || document.querySelector('#time-title').textContent === 'Last minutes'");
    browser.look_like(390, "dark");
    browser.click("[data-range='1h']");
    browser.wait_for("document.querySelector('#time-title').textContent === 'Last hour'");
    browser.picture("history-390-dark");
    browser.assert_it_fits("at 390");
    assert_eq!(browser.errors(), [""; 0]);
    served.end();
}

#[test]
fn a_week_of_seventy_two_workers_is_a_few_megabytes_and_does_not_hold_up_the_page() {
    let Some(browser) = Browser::start() else { return };
    let sandbox = Sandbox::new();
    let many = ["run", "--topology", "dgx-h100", "--simulate", "--workers-per-gpu", "9"];
    let many = sandbox.spawn(&[&many[..], &["--name", "w72", "--", "sleep", "1000"]].concat());
    eventually("72 workers", Duration::from_secs(120), || {
        sandbox.try_state("w72").is_some_and(|state| state["state"] == "ready")
    });
    let state = sandbox.state("w72");
    // Its supervisor would write into the same file.
    sandbox.kill(state["supervisor_pid"].as_u64().expect("a pid"));
    eventually("its end", Duration::from_secs(60), || sandbox.pids().is_empty());
    many.wait();
    let workers = state["workers"].as_array().expect("workers").iter();
    let names: Vec<String> =
        workers.map(|worker| worker["name"].as_str().expect("a name").to_owned()).collect();
    made(&sandbox, "w72", &names, now(), 24, |process, step| {
        Some(((process as u64 + step) % 50) as f64)
    });
    let length = fs::metadata(sandbox.base().join("w72/history")).expect("a file").len();
    assert!(length < 9 << 20, "{length} bytes");

    let served = Served::start(&sandbox);
    browser.look_like(1440, "light");
    browser.open(&format!("{}&cluster=w72", served.link));
    browser.wait_for("document.querySelectorAll('#machine .worker').length === 72");
    // Wall time would be that of everything on this machine. A task is at most all that is done.
    browser.count_work();
    let took = |range: &str| {
        let before = browser.worked();
        if !range.is_empty() {
            let button = format!("document.querySelector('[data-range=\"{range}\"]')");
            browser.script(&format!("{button}.click()"));
            browser.wait_for(&format!("{button}.getAttribute('aria-pressed') === 'true'"));
        }
        std::thread::sleep(Duration::from_secs(1));
        (browser.worked() - before).as_millis()
    };
    let idle = ["", "", "", "", ""].map(took).into_iter().min().expect("some");
    // What else the machine does makes it longer, never shorter.
    let worked = ["12h", "all", "1h", "12h", "all", "1h", "all"].map(took);
    let worked = worked.into_iter().min().expect("some");
    browser.picture("history-w72-1440-light");
    eprintln!("a second takes the page {idle} ms, and {worked} ms with a new range");
    assert!(worked < idle + 100, "{worked} ms, and {idle} ms without");
    assert_eq!(browser.errors(), [""; 0]);
    served.end();
}
